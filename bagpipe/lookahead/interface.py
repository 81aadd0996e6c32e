"""`BatchPlanner`: plans the batches that a training process brings. `WindowPlanner`: plans global batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Protocol, Self

from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.oracle.spec_check import check_spec
from bagpipe.types.batch import Batch

__all__ = ["BatchPlanner", "GlobalPlan", "WindowPlanner"]


class BatchPlanner(Protocol):
    """Plans batches. A context manager around its resources; one thread calls it.

    Attributes:
        spec: what it plans for.
        max_held: batches read and not yet yielded, at most.
    """

    spec: OracleSpec

    @property
    def max_held(self) -> int: ...

    def run(self, batches: Iterable[Batch], first_batch: int = 0) -> Generator[RankBatch, None, None]:
        """The rank's batches with their plans, in order. One run at a time; closing the generator ends it.

        Args:
            batches: this rank's batches, in the order of their indexes and without gaps. Only `index`, `values`,
                `lengths` and the number of examples are read: `dense` can have no columns, and `labels` can be zeros.
            first_batch: begin with this batch and empty caches; earlier batches are dropped.

        Yields:
            Rank batches whose `batch` is the object that was read.

        Raises:
            CapacityError: a batch does not fit the cache; names the smallest cache that would do. At once.
            InputError: an id outside its table, or batches out of order. After the batches before have been yielded.
            Exception: an error of `batches`, likewise.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class GlobalPlan(Protocol):
    """The plan of one global batch."""

    def part(self, rank: int, batch: Batch) -> RankBatch:
        """A rank's part, with the rank's own batch."""
        ...

    def frame(self, rank: int) -> Sequence[Any]:
        """A rank's part without a batch as buffers to join; `bagpipe.client.codec.decode_rank_batch` reads them."""
        ...


class WindowPlanner(ABC):
    """Plans global batches; for a single rank, a `BatchPlanner`.

    Args:
        spec: what to plan for.

    Attributes:
        spec: as given.

    Raises:
        InputError: `spec` cannot be planned for.
    """

    def __init__(self, spec: OracleSpec) -> None:
        check_spec(spec)
        self.spec = spec

    @property
    @abstractmethod
    def max_held(self) -> int:
        """See `BatchPlanner`."""

    @abstractmethod
    def plan_all(
        self, batches: Iterable[Batch], first_batch: int, on_batch: Callable[[Batch], object]
    ) -> Generator[GlobalPlan, None, None]:
        """The plans of global batches for all ranks. See `BatchPlanner.run`.

        Args:
            batches: global batches.
            first_batch: as for `run`.
            on_batch: called with each batch whose plan will come.
        """

    def run(self, batches: Iterable[Batch], first_batch: int = 0) -> Generator[RankBatch, None, None]:
        """See `BatchPlanner`. For one rank.

        Raises:
            ValueError: `spec` is for several ranks.
        """
        if self.spec.world_size != 1:
            raise ValueError(f"expected a spec for 1 rank, got {self.spec.world_size}")
        return self._run(batches, first_batch)

    def _run(self, batches: Iterable[Batch], first_batch: int) -> Generator[RankBatch, None, None]:
        waiting: deque[Batch] = deque()
        with closing(self.plan_all(batches, first_batch, waiting.append)) as plans:
            for plan in plans:
                yield plan.part(0, waiting.popleft())

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:  # noqa: B027 -- not every planner has resources
        """Start what planning needs, and do not wait for it."""

    def close(self) -> None:  # noqa: B027
        """Release the resources. Idempotent."""
