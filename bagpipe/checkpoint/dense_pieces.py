"""`Shares`: a rank's part of a divided model or stage, as checkpoints hold it.

    segments, their optimizer state ──pieces──> dense-<rank>.safetensors     the owners write them
    buffers, what is not trained, step counts ──> rank 0 writes them          `combine` joins them to whole tensors
    whole tensors ──restore──> the model's parameters, and this rank's segments of the optimizer's state

So a checkpoint can be read on any level, by any number of ranks, and by a job that divides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import MODEL, OPTIM, DenseCopy, DenseState, OwnState, capture
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.pipeline.stream import Streams

__all__ = ["Divided", "Shares"]


class Divided(Protocol):
    """Parameters that are divided among ranks."""

    @property
    def segments(self) -> Mapping[str, nn.Parameter]:
        """This rank's part of each parameter, by name in the model."""
        ...

    def pieces(self) -> Mapping[str, Piece]:
        """Place and whole shape of each segment in its parameter, by name."""
        ...

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, of each rank's elements of them; see `StageShare.joined`."""
        ...


class Shares:
    """See above.

    Args:
        model: the whole model.
        optimizer: of the segments, and of what is not divided.
        shards: the divided model or stage.
        is_first: this rank writes what is not divided.
        only: names of the parameters and buffers of the stage; None: of the whole model.

    Attributes:
        own: what the optimizer has in place of parameters, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        shards: Divided,
        *,
        is_first: bool,
        only: Collection[str] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._is_first = is_first
        self._shards = shards
        pieces = shards.pieces()
        self.own: Mapping[str, tuple[Piece, nn.Parameter]] = {
            name: (pieces[name], segment) for name, segment in shards.segments.items()
        }
        named = dict(model.named_parameters(remove_duplicate=False))
        first_names = {parameter: name for name, parameter in reversed([*model.named_parameters()])}
        #: Every name of a divided parameter -> the one under which the optimizer's state is saved.
        self._names = {name: first_names[p] for name, p in named.items() if first_names[p] in self.own}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        known = {*named, *buffers}
        self._undivided = frozenset((known if only is None else known.intersection(only)) - self._names.keys())

    def capture(
        self, streams: Streams, *, rng: Mapping[str, Tensor] | None = None, parts: Mapping[str, Tensor] | None = None
    ) -> DenseCopy:
        """Start copying what this rank writes; see `bagpipe.checkpoint.dense_state.capture`."""
        only = self._undivided if self._is_first else frozenset[str]()
        return capture(streams, self._model, self._optimizer, only=only, rng=rng, parts=parts, own=self._own_state())

    def restore(self, state: DenseState) -> None:
        """Take over whole tensors; the model has its parameters here.

        Raises:
            InputError: they are of another model or optimizer.
        """
        state.restore(self._model, self._optimizer, own=self.own)

    def writes(self, name: str) -> bool:
        """Whether this rank writes a piece of tensors that are divided as a parameter is."""
        return self._writes(*self.own[name])

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, of each rank's elements of them. All ranks that have shares call it, between batches.

        Args:
            parts: by name of a parameter, flat, as long as its segment; of the same names on all ranks.

        Raises:
            PeerError: a peer is gone or silent.
        """
        return self._shards.joined(parts)

    def _own_state(self) -> OwnState:
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        pieces: dict[str, tuple[Piece, Tensor]] = {}
        for name, first_name in self._names.items():
            piece, segment = self.own[first_name]
            if self._writes(piece, segment):
                pieces[MODEL + name] = (piece, segment)
        for full_name, piece, segment, value in self._states():
            if isinstance(value, Tensor) and value.shape == segment.shape:
                if self._writes(piece, segment):
                    pieces[full_name] = (piece, value)
            elif self._is_first:
                (tensors if isinstance(value, Tensor) else values)[full_name] = value
        return OwnState(tensors=tensors, values=values, pieces=pieces)

    def _writes(self, piece: Piece, segment: Tensor) -> bool:
        """This rank has elements of a tensor; the first one writes tensors without any."""
        return segment.numel() > 0 or (self._is_first and math.prod(piece.shape) == 0)

    def _states(self) -> Iterator[tuple[str, Piece, nn.Parameter, Any]]:
        for name, (piece, segment) in self.own.items():
            for state, value in self._optimizer.state.get(segment, {}).items():
                yield f"{OPTIM}{name}.{state}", piece, segment, value
