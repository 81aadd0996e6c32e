"""`DenseParallel`: data-parallel training of the dense part. Gradient all-reduce in rank order overlaps the backward.

    backward: a bucket's last gradient is ready ─> bucket filled ─┐ in the buckets' order, on a thread or stream
        all-reduced over the ranks (`bagpipe.dense.parallel.buckets`) <┘
    reduce: the last bucket, marked if this rank's batch is bad; wait for the buckets, copy them back

A rank with non-finite gradients blocks the last all-reduce: it never calls `reduce`, so no other rank steps.

Why not torch's DistributedDataParallel: docs/decisions/0007.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from bagpipe.dense.parallel.broadcast import share_buffers, share_model
from bagpipe.dense.parallel.buckets import BUCKET_BYTES, Bucket, check_gradient, is_bad_anywhere, make_buckets
from bagpipe.dense.parallel.ordered_exchanges import OrderedExchanges, Ticket
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import JobError
from bagpipe.types.model_inputs import device_of

__all__ = ["DenseParallel"]


@dataclass(slots=True)
class _PendingBucket:
    """A bucket, its number, and the gradients still missing before its exchange."""

    bucket: Bucket
    number: int
    missing: int


class DenseParallel:
    """Sums a model's gradients over the ranks. Use as a context manager; call `reduce` before every optimizer step.

    Entering broadcasts rank 0's parameters and buffers. A parameter without a gradient on any rank keeps none, and the
    optimizer skips it, as on one rank. A rank that ran no backward still takes part.

    Buffers that training changes (running means of a batch norm) stay local during training and see only this rank's
    share of every batch. `share_buffers` then broadcasts rank 0's, which become the model's. A model with batch norm
    therefore depends on the number of ranks, as under DistributedDataParallel.

    Args:
        model: the same parameters in the same order on every rank.
        group: the dense lane.
        bucket_bytes: largest size of a bucket; a larger parameter gets its own.
        backwards_per_step: number of micro-batches. A bucket is exchanged after this many backwards have reached all
            of its parameters, or in `reduce`.
        overlaps: exchanges begin during the backward; otherwise all are in `reduce`, and `grad` may be empty before.

    Raises:
        InputError: in backward: a parameter has a sparse gradient.
        JobError: in backward: the step has more backwards than `backwards_per_step`.
        PeerError: in `reduce`: a peer is gone or silent.
    """

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        backwards_per_step: int = 1,
        overlaps: bool = True,
    ) -> None:
        self._model = model
        self._group = group
        self._backwards_per_step = backwards_per_step
        self._overlaps = overlaps
        self._buckets = [
            _PendingBucket(bucket, number, len(bucket.parameters) * backwards_per_step)
            for number, bucket in enumerate(make_buckets(model.named_parameters(), bucket_bytes, group.world_size))
        ]
        self._is_bad = False
        self._lane = OrderedExchanges(device_of(model), name="bagpipe-dense", limit=len(self._buckets))
        self._tickets: list[Ticket] = []  # of the step's exchanges so far
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        share_model(self._model, self._group)
        with ExitStack() as stack:
            stack.enter_context(self._lane)
            for pending in self._buckets if self._overlaps else ():
                for name, parameter in zip(pending.bucket.names, pending.bucket.parameters, strict=True):
                    handle: Any = parameter.register_post_accumulate_grad_hook(self._hook(pending, name))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers. All ranks call it, between steps.

        Raises:
            PeerError: a peer is gone or silent.
        """
        share_buffers(self._model, self._group)

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        """All-reduce the gradients with SUM. All ranks call it once per step.

        Args:
            is_bad: this rank's batch is not finite. None: bad batches are not skipped, so ranks do not exchange marks.

        Returns:
            Whether any rank's batch is bad; False if `is_bad` is None.
        """
        self._is_bad = bool(is_bad)
        while len(self._tickets) < len(self._buckets):
            self._launch()
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        for pending in self._buckets:
            pending.bucket.copy_back()
        if is_bad is None:
            return False
        return self._buckets[-1].bucket.is_marked() if self._buckets else is_bad_anywhere(self._group, is_bad)

    def _hook(self, pending: _PendingBucket, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            check_gradient(name, parameter)
            if pending.number < len(self._tickets):
                raise JobError(
                    f"model parameter {name}: expected {self._backwards_per_step} backwards per step, got another "
                    f"after its gradients were exchanged"
                )
            pending.missing -= 1
            while len(self._tickets) < len(self._buckets) - 1 and self._buckets[len(self._tickets)].missing == 0:
                self._launch()

        return ready

    def _launch(self) -> None:
        """Start the next bucket's exchange. The order is equal on all ranks, for any order of the gradients."""
        pending = self._buckets[len(self._tickets)]
        pending.missing = len(pending.bucket.parameters) * self._backwards_per_step
        self._tickets.append(self._lane.submit(lambda: self._reduce(pending.bucket)))

    def _reduce(self, bucket: Bucket) -> None:
        bucket.fill()
        bucket.mark(self._is_bad)
        bucket.exchange(self._group, range(self._group.world_size))
