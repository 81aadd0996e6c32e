"""`ChunkedVersions`: the weights that a stage of an asynchronous schedule keeps, in chunks beside its parameters.

written      chunk by chunk: parameters, for predictions the optimizer's state, and what is written
forward      a unit's chunks are those of the version, whose weights its modules have meanwhile
backward     what autograd saved of them is a place in the version of the backward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, Parameter

from bagpipe.dense.chunks.budget import LAST_GRADIENT
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.versioned_call import CallWeights, SavedHooks
from bagpipe.pipeline.stage.stage_versions import StageVersions

__all__ = ["ChunkedVersions"]


class ChunkedVersions:
    """A `VersionMemory`. One thread at a time uses it.

    Args:
        versions: of the stage; its copies go to chunks.
        chunked: the chunks of the stage's lane.
        parameters: trainable ones of the stage, in the order of the copies.
        piece: number of the stage in `chunked`.
    """

    def __init__(
        self, versions: StageVersions, chunked: ChunkedModel, parameters: Sequence[Parameter], piece: int
    ) -> None:
        self._chunked = chunked
        self._piece = piece
        self._names = {id(buffers[0]): name for name, buffers in versions.kept.items()}
        kept: dict[str, Mapping[Parameter, Tensor]] = {
            name: dict(zip(parameters, buffers, strict=True)) for name, buffers in versions.kept.items()
        }
        chunked.keep({**kept, LAST_GRADIENT: versions.last_gradients})

    def write(
        self, weights: Mapping[Parameter, Tensor], write: Callable[[Sequence[Parameter]], None], *, predicts: bool
    ) -> None:
        """See `VersionMemory`."""
        name = self._name([*weights.values()])
        self._chunked.write(name, write, predicts=predicts, piece=self._piece)

    def call(
        self,
        module: Module,
        arguments: tuple[Any, ...],
        weights: CallWeights,
        *,
        buffers: Mapping[str, Tensor],
        around: SavedHooks | None = None,
    ) -> Any:
        """See `VersionMemory`. Hooks around the call stay, and have the chunks' own inside (`Places`)."""
        with self._chunked.hooks.versions(self._name(weights.forward), self._name(weights.backward)):
            return functional_call(module, dict(buffers), arguments) if buffers else module(*arguments)

    def _name(self, weights: Sequence[Tensor] | None) -> str:
        """Name of some weights; empty: the parameters."""
        return "" if weights is None else self._names[id(weights[0])]
