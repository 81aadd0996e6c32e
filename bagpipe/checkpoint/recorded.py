"""What a `Recorder` records: the dense part and the run of a training loop, as interfaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ["RecordedDense", "RecordedPiece", "RecordedRun"]


class RecordedPiece(Protocol):
    """A piece of the dense part: what one optimizer steps."""

    @property
    def tensors(self) -> frozenset[str] | None:
        """Names of its parameters and buffers in the model; None: all there are."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it has no parameters."""
        ...


class RecordedDense(Protocol):
    """The dense part that is recorded."""

    @property
    def model(self) -> Module: ...

    @property
    def pieces(self) -> Mapping[str, RecordedPiece]:
        """By name."""
        ...

    @property
    def loss_counters(self) -> tuple[str, ...]:
        """Names of its sums of losses."""
        ...

    def loss_sums(self) -> Mapping[str, Tensor]:
        """Counter -> sum of the losses so far."""
        ...


class RecordedRun(Protocol):
    """The training that is recorded."""

    def abort(self, error: BaseException) -> None:
        """End it with this error. From any thread."""

    def lost(self) -> BaseException | None:
        """Its first error."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """Numbers of the batches done, for `Part.progress`."""
        ...

    def tensors(self, piece: str) -> Mapping[str, Tensor]:
        """What is kept beside a piece of the dense part."""
        ...
