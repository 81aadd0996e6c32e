"""`NonfiniteGuard`: a loss or gradient that is not finite changes no parameter and no row.

    end of B(b): loss, gradients of parameters, gradients of rows ──one number each──> finite? ──no──> stop, or skip b

Sums tell: a NaN or an infinity among the terms makes a sum NaN or infinite. Only a sum that is not finite is looked at
more closely, as finite terms may overflow. On CUDA it is the largest magnitudes, which cannot, and which two launches
find for all tensors of a model.

On a device the numbers are looked at when they have come to the host, so that no lane waits for them, and always before
what came after them is written to the store (`check`), or has become a checkpoint (`check_before`). So the step that
goes wrong may be done on the device, and is lost with the job. Another rank may have the rows' gradients by then: what
ranks send is looked at by who gets it, too (`watch`). To skip a batch its numbers must be waited for.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.errors import JobError
from bagpipe.pipeline.stream import Streams

__all__ = ["NonFinite", "NonfiniteGuard"]

NonFinite = Literal["stop", "skip"]


def _sums(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.sum().to(torch.float64) for tensor in tensors]).sum()


def _largest(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, math.inf)).to(torch.float64).sum()


#: Kind of device -> a number that is finite if all elements of some tensors are, none of them empty.
_TOTALS: Mapping[str, Callable[[list[Tensor]], Tensor]] = {"cpu": _sums, "cuda": _largest}


@dataclass(frozen=True, slots=True)
class _Suspect:
    """What is looked at: its name, its terms, one at least."""

    what: str
    terms: Tensor


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A batch's sum on its way from the device."""

    batch: int
    what: str
    total: PendingTensor


class NonfiniteGuard:
    """One rank's.

    Args:
        streams: of the model's device.
        rank: of this process, for messages; None: there is only one.
        skips: a bad batch is left out; otherwise the job ends.
        hint: what else may help, for messages.
    """

    def __init__(self, streams: Streams, *, rank: int | None = None, skips: bool = False, hint: str = "") -> None:
        self.skips = skips
        self._streams = streams
        self._hint = hint
        self._place = "" if rank is None else f" of rank {rank}"
        self._verdicts: list[_Verdict] = []
        self._lock = threading.Lock()

    def is_bad(
        self,
        batch: int,
        *,
        loss: Tensor | None = None,
        parameters: Iterable[tuple[str, Tensor]] = (),
        groups: Sequence[ActiveTableGroup] = (),
        arrived: Sequence[Tensor] = (),
    ) -> bool:
        """Look at a batch before it changes anything.

        Args:
            batch: its number.
            loss: scalar.
            parameters: with their names; their gradients are looked at.
            groups: of the batch; gradients of their vectors are looked at.
            arrived: gradients of rows that the ranks have sent.

        Returns:
            Whether to skip it.

        Raises:
            JobError: it is bad and not to be skipped; names batch, rank, and the first thing that is not finite.
        """
        suspects = [s for s in _suspects(loss, parameters, groups, arrived) if s.terms.numel()]
        if not suspects:
            return False
        total = _TOTALS[suspects[0].terms.device.type]([suspect.terms for suspect in suspects])
        arrival = to_host(self._streams, total)
        if not self.skips and not arrival.is_ready():
            what = f"{suspects[0].what}, or a gradient," if len(suspects) > 1 else suspects[0].what
            with self._lock:
                self._verdicts.append(_Verdict(batch, what, arrival))
            return False
        return not _is_finite(arrival) and self._judge(batch, suspects)

    def watch(self, batch: int, arrived: Sequence[Tensor]) -> None:
        """Look at gradients of rows that the ranks have sent, before these rows change.

        Only where numbers are looked at late: elsewhere nobody sends a gradient that is not finite.
        """
        if self._streams.is_async and not self.skips:
            self.is_bad(batch, arrived=arrived)

    def check(self) -> None:
        """Look at the sums that have arrived from the device. From any thread.

        Raises:
            JobError: as `is_bad`.
        """
        with self._lock:
            # Lanes' sums do not arrive in the order in which the lanes have sent them: one may hold up no other.
            here: list[_Verdict] = []
            late: list[_Verdict] = []
            for verdict in self._verdicts:
                (here if verdict.total.is_ready() else late).append(verdict)
            bad = next((verdict for verdict in here if not _is_finite(verdict.total)), None)
            if bad is not None:
                # None is forgotten: a lane and the thread that makes checkpoints both ask, and neither may go on.
                raise self._error(bad.batch, bad.what)
            self._verdicts = late

    def check_before(self, batch: int) -> None:
        """Wait for the sums of all batches before this one; later ones count for nothing. From a thread that may wait.

        Raises:
            JobError: as `is_bad`.
        """
        with self._lock:
            verdicts = [verdict for verdict in self._verdicts if verdict.batch < batch]
        for verdict in verdicts:
            if not _is_finite(verdict.total):
                raise self._error(verdict.batch, verdict.what)

    def _judge(self, batch: int, suspects: Sequence[_Suspect]) -> bool:
        bad = next((s for s in suspects if not bool(torch.isfinite(s.terms).all())), None)
        if bad is None:
            return False
        if self.skips:
            return True
        raise self._error(batch, bad.what)

    def _error(self, batch: int, what: str) -> JobError:
        return JobError(
            f"batch {batch}{self._place}: {what} is not finite; nothing of this batch was stored "
            f"(run.nonfinite = skip leaves such batches out{self._hint})"
        )


def _is_finite(total: PendingTensor) -> bool:
    return math.isfinite(total.get().item())


def _suspects(
    loss: Tensor | None,
    parameters: Iterable[tuple[str, Tensor]],
    groups: Sequence[ActiveTableGroup],
    arrived: Sequence[Tensor],
) -> Iterable[_Suspect]:
    if loss is not None:
        yield _Suspect("the loss", loss.detach())
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            yield _Suspect(f"the gradient of {name}", parameter.grad)
    for group in groups:
        for vectors, _ in group.gradients:
            tables = group.context.tables
            yield _Suspect(f"a gradient of rows of tables {tables.first_table} to {tables.end_table - 1}", vectors)
    for gradients in arrived:
        yield _Suspect("a gradient of rows that a rank has sent", gradients)
