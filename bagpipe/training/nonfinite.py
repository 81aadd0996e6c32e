"""`NonfiniteGuard`: a loss or gradient that is not finite changes no parameter and no row.

What an update makes of finite gradients is looked at when it leaves the device: rows before they are stored
(`bagpipe.cache.row_transfer`), dense parameters before a checkpoint has them and at a run's end (`NonfiniteGuard.end`).

    end of the backward of b: loss, gradients of parameters, gradients of rows ──sum──> finite? ──no──> stop, or skip b

A NaN or an infinity among the terms makes a sum NaN or infinite, so one number per batch tells. A sum that is not
finite is examined more closely, as finite terms can overflow. On CUDA the number is the sum of the largest magnitudes:
it cannot overflow, and two launches compute it for all tensors of a model.

On a device the number is examined when it has come to the host, so that no lane waits for it, and always before
results of its batch are written to the store (`check`) or become a checkpoint (`check_before`). The bad step is done
on the device by then, and lost with the job. Other ranks can have received the rows' gradients, so a rank examines
what it receives too (`watch`). To skip a batch, the lane waits for its number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.cache.verdicts import Verdict, Verdicts
from bagpipe.checkpoint.optimizer_state import check_finite
from bagpipe.errors import JobError
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import DensePart
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["NonfiniteGuard"]


def _sums(tensors: list[Tensor]) -> Tensor:
    sums = [tensor.sum() for tensor in tensors]
    if any(each.dtype != torch.float32 for each in sums):
        sums = [each.to(torch.float64) for each in sums]
    return torch.stack(sums).sum()


def _largest(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, math.inf)).to(torch.float64).sum()


#: Kind of device -> a number that is finite if all elements of some tensors are, none of them empty.
_TOTALS: Mapping[str, Callable[[list[Tensor]], Tensor]] = {"cpu": _sums, "cuda": _largest}


@dataclass(frozen=True, slots=True)
class _Suspect:
    """Values to be examined: their name, and at least one term."""

    what: str
    terms: Tensor


class NonfiniteGuard(LoopPart):
    """Checks losses and gradients of one rank.

    Args:
        streams: of the model's device.
        dense: the dense part whose gradients are examined. It says whether a bad batch is left out or ends the job.
        verdicts: also of other numbers of these batches, such as whether their lookups are of their own ids; None: new.
        rank: of this process, for messages; None: there is only one.
    """

    def __init__(
        self, streams: Streams, dense: DensePart, verdicts: Verdicts | None = None, *, rank: int | None = None
    ) -> None:
        self.skips = dense.skips_nonfinite
        self._streams = streams
        self._dense = dense
        self._hint = dense.precision.loss_scale.hint
        self._run: LoopRun
        self._rank_text = "" if rank is None else f" of rank {rank}"
        self._verdicts = Verdicts() if verdicts is None else verdicts

    def hooks(self) -> Iterable[Hook]:
        for point in self._dense.gradient_points:
            when: Literal["before", "after"] = "after" if point is Point.GRADIENTS else "before"
            yield Hook(at=point, when=when, call=functools.partial(self._examine, point))

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._verdicts.clear()

    def before_write(self, epoch: int) -> None:
        self.check()

    def before_flush(self) -> None:
        self.check()

    def end(self) -> None:
        """Look at what the last steps have made of dense parameters: no later loss tells."""
        self._dense.rest()
        parameters = [(name, value.detach()) for name, value in self._dense.stepped() if value.numel()]
        if parameters:
            total = _TOTALS[parameters[0][1].device.type]([value for _, value in parameters])
            if not _is_finite(to_host(self._streams, total)):
                check_finite(parameters)

    def _examine(self, point: Point, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        losses = [*self._dense.checked_losses(point, key, b)]
        name = "the loss" if batch.rank_batch.num_global_examples else "the loss of a batch without examples"
        gradients = self._dense.checked_gradients(point, key)
        # Ranks send gradients of rows as soon as they are complete.
        groups = batch.groups if point is Point.GRADIENTS else ()
        if self.is_bad(b, losses=losses, name=name, gradients=gradients, groups=groups):
            batch.is_skipped = True

    def is_bad(
        self,
        batch: int,
        *,
        losses: Sequence[Tensor] = (),
        name: str = "the loss",
        gradients: Iterable[tuple[str, Tensor]] = (),
        groups: Sequence[ActiveTableGroup] = (),
        arrived: Sequence[Tensor] = (),
    ) -> bool:
        """Look at a batch before it changes anything.

        Args:
            batch: its number.
            losses: scalars.
            name: of a loss, for the error.
            gradients: names of parameters, and their gradients or values that are finite if these are.
            groups: of the batch; gradients of their vectors are looked at.
            arrived: gradients of rows that the ranks have sent.

        Returns:
            Whether to skip it.

        Raises:
            JobError: it is bad and not to be skipped; names batch, rank, and the first thing that is not finite.
        """
        suspects = [s for s in _suspects(losses, name, gradients, groups, arrived) if s.terms.numel()]
        if not suspects:
            return False
        total = _TOTALS[suspects[0].terms.device.type]([suspect.terms for suspect in suspects])
        arrival = to_host(self._streams, total)
        if not self.skips and not arrival.is_ready():
            what = f"{suspects[0].what}, or a gradient," if len(suspects) > 1 else suspects[0].what
            error = functools.partial(self._error, batch, what)
            self._verdicts.add(Verdict(batch, arrival, _is_finite_number, error))
            return False
        return not _is_finite(arrival) and self._judge(batch, suspects)

    def watch(self, batch: int, arrived: Sequence[Tensor]) -> None:
        """Look at gradients of rows that the ranks have sent, before these rows change.

        Only on asynchronous devices: elsewhere the sender has checked its gradients before it sends them.
        """
        if self._streams.is_async and not self.skips:
            self.is_bad(batch, arrived=arrived)

    def check(self) -> None:
        """Look at the sums that have arrived from the device. From any thread.

        Raises:
            JobError: as `is_bad`.
        """
        self._verdicts.check()

    def check_before(self, batch: int) -> None:
        """Wait for the sums of all batches before this one; later ones count for nothing. From a thread that may wait.

        Raises:
            JobError: as `is_bad`.
        """
        self._verdicts.check_before(batch)

    def _judge(self, batch: int, suspects: Sequence[_Suspect]) -> bool:
        bad = next((s for s in suspects if not bool(torch.isfinite(s.terms).all())), None)
        if bad is None:
            return False
        if self.skips:
            return True
        raise self._error(batch, bad.what)

    def _error(self, batch: int, what: str) -> JobError:
        return JobError(
            f"batch {batch}{self._rank_text}: {what} is not finite; nothing of this batch was stored "
            f"(run.nonfinite = skip leaves such batches out{self._hint})"
        )


def _is_finite(total: PendingTensor) -> bool:
    return _is_finite_number(total.get())


def _is_finite_number(total: Tensor) -> bool:
    return math.isfinite(total.item())


def _suspects(
    losses: Sequence[Tensor],
    loss_name: str,
    gradients: Iterable[tuple[str, Tensor]],
    groups: Sequence[ActiveTableGroup],
    arrived: Sequence[Tensor],
) -> Iterable[_Suspect]:
    for loss in losses:
        yield _Suspect(loss_name, loss.detach())
    for name, gradient in gradients:
        if gradient.layout is torch.strided:
            yield _Suspect(f"the gradient of {name}", gradient)
    for group in groups:
        for found in group.gradients:
            tables = group.context.tables
            what = f"a gradient of rows of tables {tables.first_table} to {tables.end_table - 1}"
            yield _Suspect(what, found.vectors)
    for gradients in arrived:
        yield _Suspect("a gradient of rows that a rank has sent", gradients)
