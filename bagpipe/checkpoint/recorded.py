"""Interfaces of the state a `Recorder` saves: the dense part and the training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from bagpipe.checkpoint.dense_state import DenseCopy
    from bagpipe.dense.parallel.shard_layout import Piece
    from bagpipe.pipeline.stream import Streams

__all__ = ["NoRun", "RecordedDense", "RecordedRun", "items_of"]


class RecordedDense(Protocol):
    """The dense part to save."""

    @property
    def model(self) -> Module: ...

    @property
    def chunks(self) -> Mapping[str, object]:
        """Its chunks by name."""
        ...

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        """Start copying what this rank writes of a chunk; see `bagpipe.checkpoint.dense_state.capture`."""
        ...

    @property
    def loss_counters(self) -> tuple[str, ...]:
        """Names of its loss sums."""
        ...

    def loss_sums(self, before: int | None = None) -> Mapping[str, Tensor]:
        """Counter -> sum of the losses of the batches before one, which are the latest; None: of those that ended."""
        ...


class RecordedRun(Protocol):
    """The training run to save."""

    def at_rest(self) -> RecordedRun:
        """The run to save once this one is left, without its batches and runner."""
        ...

    def abort(self, error: BaseException) -> None:
        """End the run with this error. Thread-safe."""

    def first_error(self) -> BaseException | None:
        """The run's first error, or None."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """Counters of the completed batches, for `Part.progress`."""
        ...

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        """Additional tensors of a dense chunk before a batch (weight averages)."""
        ...

    def pieces(self, chunk: str) -> Mapping[str, Piece]:
        """Of `tensors`, those that are pieces of tensors, by full name."""
        ...

    def of_this_rank(self, names: Iterable[str]) -> frozenset[str]:
        """Of the names of `tensors`, the full names of those that other ranks with the chunk do not have."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """Whether `row_tensors` are in checkpoints."""
        ...

    def row_tensors(self) -> Mapping[str, Tensor]:
        """Additional tensors of this rank's rows, after the updates of a batch."""
        ...


class NoRun:
    """Before the first training run: rows can be written, and an error of their recording is raised at the next one."""

    keeps_rows = False

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def abort(self, error: BaseException) -> None:
        self._error = self._error or error

    def first_error(self) -> BaseException | None:
        return self._error

    def at_rest(self) -> NoRun:
        return self

    def counters(self) -> Mapping[str, Any]:
        return {}

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        return {}

    def pieces(self, chunk: str) -> Mapping[str, Piece]:
        return {}

    def of_this_rank(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset()

    def row_tensors(self) -> Mapping[str, Tensor]:
        return {}


def items_of(dense: RecordedDense, run: RecordedRun) -> set[str]:
    """Names of the items of a checkpoint with files; it is complete when lanes have completed all of them."""
    copies = [*dense.chunks, *(f"loss {name}" for name in dense.loss_counters)]
    copies += ["rows"] if run.keeps_rows else []
    return {"snapshot", "log", "rows", *(f"dense {name}" for name in copies)}
