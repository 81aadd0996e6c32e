"""`ActionTimes`: seconds of the actions of compute and reduce lanes in a job, without waits for other ranks.

Lane._act ──patched──> seconds of each action, less those that its thread waited for transfers and exchanges
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

from bagpipe.distributed import collectives
from bagpipe.distributed.collectives import LaneGroup
from bagpipe.pipeline.lane import Lane

__all__ = ["ActionTimes"]

#: Share of the actions at the start that do not count.
_RAMP = 0.25


@dataclass(slots=True, kw_only=True)
class ActionTimes:
    """Seconds so far, by stage and operation."""

    spent: dict[str, list[float]] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure from here on."""
        act = Lane._act

        def acted(lane: Lane, step: Any, batch: int) -> None:
            self._local.waited_s = 0.0
            start_s = time.perf_counter()
            act(lane, step, batch)
            spent_s = time.perf_counter() - start_s - self._local.waited_s
            if lane.name.startswith(("compute", "reduce")):
                key = f"{lane.name} {step.text}" if step.text == "0X_UPDATE" else step.text.partition(":")[0]
                self.spent.setdefault(key, []).append(spent_s)

        with ExitStack() as stack:
            stack.enter_context(patch.object(Lane, "_act", acted))
            for owner, name in ((collectives._Transfer, "wait"), (LaneGroup, "_wait")):
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def medians(self) -> dict[str, float]:
        """Median seconds of each action."""
        return {text: median(own[int(len(own) * _RAMP) :]) for text, own in self.spent.items() if own}

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return wait(*arguments)
            finally:
                so_far = getattr(self._local, "waited_s", 0.0)
                self._local.waited_s = so_far + time.perf_counter() - start_s

        return waited
