"""`DenseParallel`: data-parallel training of the dense part; gradients summed in rank order, under the backward.

    backward: a bucket's last gradient is there ─> bucket copied out ─┐ in the buckets' order, on a thread or stream
        all-to-all: chunk r of every rank's bucket to rank r  <───────┘
        rank r: chunk = ((rank 0's + rank 1's) + rank 2's) + …
        all-gather: every rank has every chunk
    optimizer step: wait for the buckets, copy them back, step

Rule of this file: *every element is summed in rank order, alone.* So the sum does not depend on how parameters are cut
into buckets, all ranks get the same bits, and the volume is that of a ring all-reduce. Gradients are summed, not
averaged: the loss is divided by the number of examples of the global batch already.

Why not torch's DistributedDataParallel: docs/decisions/0007.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.peers.exchange import LaneGroup

__all__ = ["BUCKET_BYTES", "DenseParallel"]

#: Large enough for a network's bandwidth, small enough to start under the backward; torch's own are 1 and 25 MiB.
BUCKET_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        names, parameters: in the order in which backward is expected to reach them.
        given: flat, their gradients, then one flag each (it has a gradient here), then padding to a multiple of the
            ranks; after the exchange the sums of all that.
        taken: as large: every rank's contribution to this rank's chunk.
        missing: parameters whose gradient is not there yet.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    given: Tensor
    taken: Tensor
    missing: int

    def parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its place in `given`."""
        first = 0
        for parameter in self.parameters:
            yield parameter, self.given[first : first + parameter.numel()].view(parameter.shape)
            first += parameter.numel()

    def flags(self) -> Tensor:
        first = sum(parameter.numel() for parameter in self.parameters)
        return self.given[first : first + len(self.parameters)]


class DenseParallel:
    """Sums a model's gradients over the ranks before every step of its optimizer. Use as a context manager.

    Entering gives all ranks rank 0's parameters and buffers. A parameter that has a gradient on no rank keeps none, and
    the optimizer leaves it alone, as on one rank. A rank that ran no backward takes part all the same.

    Buffers that training changes (running means of a batch norm) are each rank's own while it trains, and see its share
    of every batch; `share_buffers` then gives all ranks rank 0's, which is what counts. So a model with batch norm
    depends on the number of ranks, as it does under DistributedDataParallel.

    Args:
        model: the same parameters in the same order on every rank; one backward per step.
        optimizer: of its parameters; its step waits for the sums.
        group: the dense lane.
        bucket_bytes: gradients that travel together, at most (one parameter at least).

    Raises:
        InputError: in backward, a parameter has a sparse gradient.
        PeerError: in the optimizer's step, a peer is gone or silent.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: LaneGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._buckets = _make_buckets(model, bucket_bytes, group.world_size)
        self._launched = 0
        self._handles: list[Any] = []
        device = next(model.parameters(), torch.empty(0)).device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One place for each bucket, one for the end: a bucket is queued once per step.
        self._queue: queue.Queue[_Bucket | None] = queue.Queue(maxsize=len(self._buckets) + 1)
        self._done: queue.Queue[BaseException | None] = queue.Queue(maxsize=len(self._buckets) + 1)
        self._worker = threading.Thread(target=self._work, name="bagpipe-dense", daemon=True)

    def __enter__(self) -> Self:
        for parameter in self._model.parameters():
            self._group.broadcast(parameter)
        self.share_buffers()
        for bucket in self._buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                handle = parameter.register_post_accumulate_grad_hook(self._hook(bucket, name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        self._handles.append(self._optimizer.register_step_pre_hook(lambda *_: self.finish()))
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

    def finish(self) -> None:
        """Wait until the step's gradients are the sums over all ranks."""
        while self._launched < len(self._buckets):
            self._launch()
        self._launched = 0
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        else:
            for error in [self._done.get() for _ in self._buckets]:
                if error is not None:
                    raise error
        for bucket in self._buckets:
            self._copy_back(bucket)

    def _hook(self, bucket: _Bucket, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise InputError(
                    f"model parameter {name}: expected a dense gradient, got a {parameter.grad.layout} one"
                )
            bucket.missing -= 1
            while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
                self._launch()

        return ready

    def _launch(self) -> None:
        """Start the next bucket. All ranks start them in the same order, whatever the order of their gradients."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.missing = len(bucket.parameters)
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

    def _reduce(self, bucket: _Bucket) -> None:
        flags = []
        for parameter, part in bucket.parts():
            flags.append(parameter.grad is not None)
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)
        bucket.flags().copy_(torch.tensor(flags, dtype=bucket.given.dtype), non_blocking=True)
        num_ranks = self._group.world_size
        chunk = len(bucket.given) // num_ranks
        self._group.all_to_all(bucket.taken, bucket.given, [chunk] * num_ranks, [chunk] * num_ranks)
        contributions = bucket.taken.view(num_ranks, chunk)
        total = contributions[0]
        for contribution in contributions[1:]:
            total.add_(contribution)
        self._group.all_gather(bucket.given, total)

    def _copy_back(self, bucket: _Bucket) -> None:
        somewhere: list[float] = []
        for number, (parameter, part) in enumerate(bucket.parts()):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
                continue
            # Only now: reading the flags waits for the device, and a rank that has all gradients need not know.
            somewhere = somewhere or bucket.flags().tolist()
            if somewhere[number]:
                parameter.grad = part.clone()


def _make_buckets(model: nn.Module, bucket_bytes: int, num_ranks: int) -> list[_Bucket]:
    """Cut the trainable parameters, last first as backward reaches them, into runs of one dtype and so many bytes."""
    runs: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in reversed(trainable):
        size += parameter.nbytes
        if not runs or size > bucket_bytes or runs[-1][0][1].dtype != parameter.dtype:
            runs.append([])
            size = parameter.nbytes
        runs[-1].append((name, parameter))
    buckets = []
    for run in runs:
        parameters = tuple(parameter for _, parameter in run)
        length = sum(parameter.numel() for parameter in parameters) + len(parameters)
        given = parameters[0].new_zeros(-(-length // num_ranks) * num_ranks, requires_grad=False)
        buckets.append(
            _Bucket(
                names=tuple(name for name, _ in run),
                parameters=parameters,
                given=given,
                taken=torch.zeros_like(given),
                missing=len(parameters),
            )
        )
    return buckets
