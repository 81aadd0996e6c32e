"""`InlinePlanner`: plans in the calling thread. For debugging and small jobs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planning import Planned, in_order, planned_batches
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch

__all__ = ["InlinePlanner"]


class InlinePlanner(WindowPlanner):
    """Plans in the calling thread. Planning takes the interpreter lock from the other threads.

    Args:
        spec: what to plan for.

    Raises:
        InputError: `spec` cannot be planned for.
    """

    @property
    def max_held(self) -> int:
        """See `BatchPlanner`: the window."""
        return self.spec.lookahead if self.spec.num_slots else 1

    def plan_all(
        self, batches: Iterable[Batch], first_batch: int, on_batch: Callable[[Batch], object]
    ) -> Generator[Planned, None, None]:
        """See `WindowPlanner`."""
        return planned_batches(make_planner(self.spec), in_order(batches, first_batch), on_batch=on_batch)
