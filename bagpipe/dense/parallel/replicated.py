"""`DenseParallel`: data-parallel training of the dense part; gradients summed in rank order, under the backward.

    backward: a bucket's last gradient is there ─> bucket filled ─┐ in the buckets' order, on a thread or stream
        exchanged: the sums over all ranks (`bagpipe.dense.parallel.buckets`) <┘
    reduce: the last bucket, marked if this rank's batch is bad; wait for the buckets, copy them back

A rank with non-finite gradients blocks the last all-reduce: it never calls `reduce`, so no other rank steps.

Why not torch's DistributedDataParallel: docs/decisions/0007.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.broadcast import share_model
from bagpipe.dense.parallel.buckets import BUCKET_BYTES, Bucket, check_gradient, make_buckets
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import JobError

__all__ = ["DenseParallel"]


@dataclass(slots=True)
class _Awaited:
    """A bucket, its number, and how many gradients must still come before it travels."""

    bucket: Bucket
    number: int
    missing: int


class DenseParallel:
    """Sums a model's gradients over the ranks. Use as a context manager; call `reduce` before every optimizer step.

    Entering gives all ranks rank 0's parameters and buffers. A parameter that has a gradient on no rank keeps none, and
    the optimizer leaves it alone, as on one rank. A rank that ran no backward takes part all the same.

    Buffers that training changes (running means of a batch norm) are each rank's own while it trains, and see its share
    of every batch; `share_buffers` then gives all ranks rank 0's, which is what counts. So a model with batch norm
    depends on the number of ranks, as it does under DistributedDataParallel.

    Args:
        model: the same parameters in the same order on every rank.
        group: the dense lane.
        bucket_bytes: gradients that travel together, at most (one parameter at least).
        backwards_per_step: micro-batches: a bucket travels when so many backwards have reached all of its parameters,
            or when the step is due.

    Raises:
        InputError: in backward, a parameter has a sparse gradient.
        JobError: in backward, it is one more than those of the step.
        PeerError: in `reduce`, a peer is gone or silent.
    """

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        backwards_per_step: int = 1,
    ) -> None:
        self._model = model
        self._group = group
        self._backwards_per_step = backwards_per_step
        self._buckets = [
            _Awaited(bucket, number, len(bucket.parameters) * backwards_per_step)
            for number, bucket in enumerate(make_buckets(model.named_parameters(), bucket_bytes, group.world_size))
        ]
        self._launched = 0
        self._is_bad = False
        self._handles: list[Any] = []
        device = next(model.parameters(), torch.empty(0)).device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One place for each bucket, one for the end: a bucket is queued once per step.
        self._queue: queue.Queue[Bucket | None] = queue.Queue(maxsize=len(self._buckets) + 1)
        self._done: queue.Queue[BaseException | None] = queue.Queue(maxsize=len(self._buckets) + 1)
        self._worker = threading.Thread(target=self._work, name="bagpipe-dense", daemon=True)

    def __enter__(self) -> Self:
        share_model(self._model, self._group)
        for awaited in self._buckets:
            for name, parameter in zip(awaited.bucket.names, awaited.bucket.parameters, strict=True):
                handle = parameter.register_post_accumulate_grad_hook(self._hook(awaited, name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._queue.put(None)
        self._worker.join()  # its exchanges have a deadline

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers; between steps, by all ranks.

        Raises:
            PeerError: a peer is gone or silent.
        """
        for buffer in self._model.buffers():
            self._group.broadcast(buffer)

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        """Make the gradients the sums over all ranks; by all ranks, once per step.

        Args:
            is_bad: this rank's batch is not finite; None: batches are not skipped, so ranks do not tell each other.

        Returns:
            Whether any rank's batch is bad; False for None.
        """
        self._is_bad = bool(is_bad)
        while self._launched < len(self._buckets):
            self._launch()
        self._launched = 0
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        else:
            for error in [self._done.get() for _ in self._buckets]:
                if error is not None:
                    raise error
        for awaited in self._buckets:
            awaited.bucket.copy_back()
        if is_bad is None:
            return False
        if self._buckets:
            return self._buckets[-1].bucket.is_marked()
        marks = torch.zeros(self._group.world_size)
        self._group.all_gather(marks, torch.full((1,), float(is_bad)))
        return bool(marks.any())

    def _hook(self, awaited: _Awaited, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            check_gradient(name, parameter)
            if awaited.number < self._launched:
                raise JobError(
                    f"model parameter {name}: a backward after the {self._backwards_per_step} of the step, whose "
                    f"gradients are with the other ranks already"
                )
            awaited.missing -= 1
            while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].missing == 0:
                self._launch()

        return ready

    def _launch(self) -> None:
        """Start the next bucket. All ranks start them in the same order, whatever the order of their gradients."""
        awaited = self._buckets[self._launched]
        bucket = awaited.bucket
        awaited.missing = len(bucket.parameters) * self._backwards_per_step
        self._launched += 1
        if self._stream is None:
            self._queue.put(bucket)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)

    def _work(self) -> None:
        first: BaseException | None = None
        while (bucket := self._queue.get()) is not None:
            if first is None:
                try:
                    self._reduce(bucket)
                except BaseException as error:  # raised where the step waits for it
                    first = error
            self._done.put(first)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.fill()
        bucket.mark(self._is_bad)
        bucket.exchange(self._group, range(self._group.world_size))
