"""`WeightAverage`: an exponential moving average of the dense weights, kept while they train.

    when a chunk's new weights are here:  average = decay * average + (1 - decay) * weight       lane compute, or reduce

Checkpoints keep the averages; evaluation uses them if asked. Averages begin as the initial weights, in their dtype.
The rule is that of ``torch.optim.swa_utils.get_ema_multi_avg_fn``; buffers (running means) are not averaged. It treats
each element by itself: where ranks divide a chunk, each averages its segments, and evaluation gathers the averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import DensePart
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["WeightAverage"]


class WeightAverage(LoopPart):
    """Averages of the trainable parameters of one model.

    Args:
        dense: the dense part, its weights initial.
        decay: weight of the average before, in [0, 1).
        evaluates: evaluation uses the averages.

    Attributes:
        averages: by parameter name; of this rank's segment, flat, if the parameter is divided. With stages on several
            ranks only those of the chunks held here are current, until `share`.
    """

    name = "average"

    def __init__(self, dense: DensePart, decay: float, *, evaluates: bool = False) -> None:
        self._dense = dense
        self._decay = decay
        self._evaluates = evaluates
        self._weights = dict(dense.parameters)
        self._pieces = {name: piece for own in dense.divided.values() for name, (piece, _) in own.own.items()}
        segments = {name: segment for own in dense.divided.values() for name, (_, segment) in own.own.items()}
        self._averaged = {**self._weights, **segments}
        self.averages: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in self._averaged.items()}
        self._wholes: Mapping[str, Tensor] = {}  # averages of divided parameters, around an evaluation
        self._is_kept = dense.keep_averages(self.averages, decay)
        self._run: LoopRun

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.WEIGHTS, when="after", call=self._update)

    def start(self, run: LoopRun) -> None:
        self._run = run

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        return {name: self.averages[name] for name in self._written(chunk)}

    def pieces(self, chunk: str) -> Mapping[str, Piece]:
        return {name: self._pieces[name] for name in self._written(chunk) if name in self._pieces}

    def _written(self, chunk: str) -> Iterator[str]:
        """Names of the averages of which this rank's checkpoints have something."""
        shares = self._dense.divided.get(chunk)
        return (name for name, _ in self._dense.chunks[chunk].parameters if shares is None or shares.writes(name))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self.averages.keys():
            missing = sorted(self.averages.keys() - tensors.keys())
            first = f"none of {missing[0]!r}" if missing else f"one of {min(tensors.keys() - self.averages.keys())!r}"
            raise InputError(
                f"the checkpoint has weight averages of {len(tensors)} parameters and {first}, this job keeps "
                f"{len(self.averages)}: resume it with optim.ema_decay = 0"
            )
        for name, tensor in tensors.items():
            average, piece = self.averages[name], self._pieces.get(name)
            own = tensor if piece is None else tensor.reshape(-1)[piece.first : piece.first + average.numel()]
            average.copy_(own)

    def share(self, stages: Sequence[HeldStage], group: RankGroup) -> None:
        self._wholes = self._joined()
        for stage in stages:
            for name, _ in stage.parameters:
                group.broadcast(self._wholes.get(name, self.averages[name]), stage.holders[0])
        if not self._evaluates:
            self._wholes = {}

    def evaluating(self) -> AbstractContextManager[object]:
        return self.swapped_in() if self._evaluates else nullcontext()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model, which is whole, has the averages for weights. All ranks that divide it enter alike."""
        if not self._wholes:
            self._wholes = self._joined()
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self._wholes = {}

    def _joined(self) -> Mapping[str, Tensor]:
        """Averages of the divided parameters that are held here, whole. By all ranks that divide them."""
        return {
            name: whole
            for shares in self._dense.divided.values()
            for name, whole in shares.joined({name: self.averages[name] for name in shares.own}).items()
        }

    def _update(self, key: OpKey, b: int) -> None:
        chunk = None if self._is_kept else self._dense.chunk_of(key)
        if chunk is None or not chunk.parameters or self._run.in_flight[b].is_skipped:
            return
        averages = [self.averages[name] for name, _ in chunk.parameters]
        weights = [self._averaged[name].detach() for name, _ in chunk.parameters]
        torch._foreach_lerp_(averages, weights, 1.0 - self._decay)

    def _swap(self) -> None:
        self._dense.rest()
        for name, weight in self._weights.items():
            kept = self._wholes.get(name, self.averages[name])
            average = kept.clone()
            kept.copy_(weight.detach())
            weight.data.copy_(average)
