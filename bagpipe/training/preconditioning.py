"""`Preconditioning`: K-FAC state of this rank as a part of the loop: checkpoints keep it, beside the dense chunks.

A chunk of the dense part (`DensePart.chunks`) with linear layers has a `Kfac`. Ranks own different layers, so each one
writes its own state, and a resumed job takes that of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bagpipe.dense.precondition.kfac import Kfac
from bagpipe.training.part import LoopPart

__all__ = ["Preconditioning"]


class Preconditioning(LoopPart):
    """State of K-FAC.

    Args:
        chunks: name of a chunk -> K-FAC of its layers.
    """

    name = "kfac"

    def __init__(self, chunks: Mapping[str, Kfac]) -> None:
        self._chunks = chunks
        self.is_divided = any(kfac.is_shared for kfac in chunks.values())

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        return self._chunks[chunk].tensors(step) if chunk in self._chunks else {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return  # a checkpoint that was made of other weights (`bagpipe.start_from`): the factors begin anew
        for kfac in self._chunks.values():
            kfac.load(tensors)
