"""`LaneGroup`: exchanges over one process group, with a deadline. Errors name the lane, the peer and the cause.

collective    start (async) ─> host: wait, polling for failed ranks                             ─> done, or PeerError
                            └> device: the current stream waits, the thread does not; the watcher calls `find_hang`
send/receive  start (async) ─> `Pending`; its wait does the same, but without polling on the host: `end_transfers`
                               breaks the group's connections after a failure, which ends all waits

Host transfers cannot be polled: gloo reports their state only in a wait, and a wait that times out breaks the group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagpipe.distributed.failure import Failures
from bagpipe.distributed.interface import Pending
from bagpipe.errors import PeerError

__all__ = ["LaneGroup"]

#: How often a waiting thread checks whether any rank, this one included, has failed.
_POLL = timedelta(seconds=0.25)
#: Device exchanges tracked for `find_hang`; the bounded in-flight batches keep fewer pending per lane.
_MAX_PENDING = 64
#: Tag of the receive that breaks a group; no send uses it.
_UNUSED_TAG = (1 << 31) - 1
#: torch 2.13 renamed this function and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LaneGroup:
    """One lane's communicator, a `bagpipe.distributed.interface.RankGroup`.

    One thread calls it; `abort`, `end_transfers` and `find_hang` are thread-safe.

    Args:
        name: for error messages.
        group: a process group, its ranks ascending.
        ranks: the group's ranks in the job.
        rank: this rank in the job.
        timeout_s: deadline of one exchange; equal to the group's own.
        failures: queried for the cause when an exchange fails.

    Attributes:
        name: as given.
        rank: position of this rank in the group.
        world_size: number of ranks in the group.
    """

    def __init__(
        self,
        *,
        name: str,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        failures: Failures,
    ) -> None:
        self.name = name
        self.rank = ranks.index(rank)
        self.world_size = len(ranks)
        self._ranks = tuple(ranks)
        self._group = group
        self._timeout_s = timeout_s
        self._failures = failures
        self._on_device = dist.get_backend(group) == "nccl"
        self._is_aborted = False
        self._has_transfers = False
        self._pending: deque[tuple[float, Callable[[], bool]]] = deque(maxlen=_MAX_PENDING)

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        """All-to-all of rows; see `Peers.exchange`."""
        self._run(
            f"exchange of {sum(input_rows)} rows for {sum(output_rows)}",
            lambda: dist.all_to_all_single(
                output, input, list(output_rows), list(input_rows), group=self._group, async_op=True
            ),
        )

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """``output[r * n : (r + 1) * n]`` = rank r's 1-D `input` of n elements."""
        self._run(
            f"gathering {len(input)} elements of every rank",
            lambda: _all_gather(output, input, group=self._group, async_op=True),
        )

    def collect(self, values: Tensor) -> list[Tensor]:
        """Gather the ranks' 1-D tensors (one dtype, any lengths) at rank 0, ordered by rank; [] elsewhere."""
        gathered = torch.empty(self.world_size, dtype=torch.int64)
        self.all_gather(gathered, torch.tensor([len(values)]))
        lengths = gathered.tolist() if self.rank == 0 else [0] * self.world_size
        output = values.new_empty(sum(lengths))
        self.all_to_all(output, values.contiguous(), lengths, [len(values)] + [0] * (self.world_size - 1))
        return list(torch.split(output, lengths)) if self.rank == 0 else []

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Broadcast in place from position `root`. Any dtype: the transfer is bytewise."""
        if not tensor.numel():
            return
        values = tensor.detach().contiguous()
        if self._on_device:
            values = values.cuda()  # optimizers keep some state on the host
        flat = values.view(-1).view(torch.uint8)
        self._run(
            f"rank {self._ranks[root]}'s values",
            lambda: dist.broadcast(flat, group_src=root, group=self._group, async_op=True),
        )
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)

    def maximum(self, number: int) -> int:
        """All-reduce with MAX of one number per rank."""
        value = torch.tensor([number], dtype=torch.int32)
        self._run(
            "a number from every rank",
            lambda: dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True),
        )
        return int(value)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start sending a contiguous tensor to the rank at position `to`. See `StageLinks`; nccl ignores tags.

        Args:
            tensor: an empty one is not transferred, on either side.
            tag: from 0; equal on both sides.

        Raises:
            PeerError: the peer is gone, or a rank has failed.
            InputError, SystemExit: another rank has failed with this error.
        """
        return self._transfer(self._group.send, tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start receiving into a contiguous tensor from the rank at position `source`. See `send`."""
        return self._transfer(self._group.recv, tensor, source, tag)

    def abort(self) -> None:
        """End transfers and hanging device exchanges. Host collectives end by polling."""
        if self._on_device and not self._is_aborted:
            self._is_aborted = True
            self._group._get_backend(torch.device("cuda")).abort()
        self.end_transfers()

    def end_transfers(self) -> None:
        """End all host transfers of this rank, and their remote ends. Call after any rank has failed."""
        if self._on_device or self._is_aborted or not self._has_transfers:
            return
        self._is_aborted = True
        peer = (self.rank + 1) % self.world_size
        with suppress(RuntimeError):  # a receive that times out makes gloo close all connections of the group
            self._group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def find_hang(self) -> PeerError | None:
        """An error if a device exchange is past its deadline. The host never waits for one, so no timeout fires."""
        now_s = time.monotonic()
        while self._pending and self._pending[0][1]():
            self._pending.popleft()
        if self._pending and now_s - self._pending[0][0] > self._timeout_s:
            return PeerError(self._message("an exchange on the device", "no end"))
        return None

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if self._on_device:
                work.wait()
                end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the work would keep its tensors
                end.record()
                self._pending.append((time.monotonic(), end.query))
            else:
                self._wait(work)
        except RuntimeError as error:
            raise self._error(what, error) from None

    def _transfer(self, start: Callable[[list[Tensor], int, int], Any], tensor: Tensor, peer: int, tag: int) -> Pending:
        if not tensor.numel():
            return _EMPTY_TRANSFER
        self._has_transfers = True  # set before the check: a failure found later ends this transfer
        end = self._failures.end()
        if end is not None:
            raise end
        try:
            work = start([tensor], peer, tag)
        except RuntimeError as error:
            raise self._error(f"a connection to rank {self._ranks[peer]}", error) from None
        if self._on_device:
            self._pending.append((time.monotonic(), work.is_completed))
        return _Transfer(self, work, tensor, peer, tag)

    def _transfer_error(self, tensor: Tensor, peer: int, tag: int, error: RuntimeError) -> BaseException:
        return self._error(f"rank {self._ranks[peer]} at the other end of {tensor.numel()} values (tag {tag})", error)

    def _error(self, what: str, error: RuntimeError) -> BaseException:
        """The error to raise for a failed exchange."""
        message = self._message(what, _first_sentence(error))
        return self._failures.end() or self._failures.explain(message) or PeerError(message)

    def _wait(self, work: Any) -> None:
        """Wait for a host exchange. The group's own deadline bounds the wait.

        Raises:
            RuntimeError: the communicator's error.
            PeerError, InputError, SystemExit: any rank, this one included, has failed during the wait.
        """
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the communicator's own error, unless the exchange has just completed
                    return
            end = self._failures.end()
            if end is not None:
                raise end

    def _message(self, what: str, why: str) -> str:
        return f"{self.name} lane: waited for {what}, at most {self._timeout_s:g} s (run.peer_timeout_s): {why}"


class _Transfer:
    """A pending transfer. Keeps the tensor's memory alive."""

    __slots__ = ("_lane", "_peer", "_tag", "_tensor", "_work")

    def __init__(self, lane: LaneGroup, work: Any, tensor: Tensor, peer: int, tag: int) -> None:
        self._lane = lane
        self._work = work
        self._tensor = tensor
        self._peer = peer
        self._tag = tag

    def wait(self) -> None:
        """See `Pending`. Idempotent."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._lane._transfer_error(self._tensor, self._peer, self._tag, error) from None
        self._work = None


class _EmptyTransfer:
    """Transfer of an empty tensor: a no-op."""

    def wait(self) -> None:
        pass


_EMPTY_TRANSFER = _EmptyTransfer()


def _first_sentence(error: RuntimeError) -> str:
    """First sentence of a communicator's error, without its source location."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2].partition(". ")[0] if line.startswith("[") else line.partition(". ")[0]
