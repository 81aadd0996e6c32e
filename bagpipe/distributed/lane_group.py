"""`LaneGroup`: exchanges of one process group, with a deadline and errors that name lane, peer and reason.

collective    start (async) ─> host: wait, at times looking whether a rank has failed         ─> done, or PeerError
                            └> device: the current stream waits, the thread does not; `find_hang` watches from outside
send/receive  start (async) ─> `Pending`; its wait is the same, but on the host nobody looks: a rank's failure is made
                               to break the group's connections (`end_transfers`), which ends all waits

Why nobody looks: gloo says nothing of a transfer but in a wait, and a wait that runs out of time breaks the group.
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

#: How often a waiting thread looks whether a rank, another or this one, has failed meanwhile.
_POLL = timedelta(seconds=0.25)
#: Device exchanges remembered for `find_hang`; a lane has fewer under way, since batches are bounded.
_MAX_PENDING = 64
#: Tag of the receive that breaks a group; nobody sends with it.
_NO_TAG = (1 << 31) - 1
#: torch 2.13 renamed it, and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LaneGroup:
    """One lane's communicator, a `bagpipe.distributed.interface.RankGroup`. Calls come from one thread, except `abort`,
    `end_transfers` and `find_hang`.

    Args:
        name: for error messages.
        group: a process group, its ranks ascending.
        ranks: their numbers in the job.
        rank: number of this one in the job.
        timeout_s: deadline of one exchange; that of the group.
        failures: asked for the reason when an exchange fails.

    Attributes:
        name: as given.
        rank: position of this rank in the group.
        world_size: ranks of the group.
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
        self._pending: deque[tuple[float, Any]] = deque(maxlen=_MAX_PENDING)

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        """Rows for every rank, rows from every rank; see `Peers.exchange`."""
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
        """Every rank's 1-D tensor of one dtype, whatever the lengths, by rank, at rank 0; nothing at the others."""
        gathered = torch.empty(self.world_size, dtype=torch.int64)
        self.all_gather(gathered, torch.tensor([len(values)]))
        taken = gathered.tolist() if self.rank == 0 else [0] * self.world_size
        output = values.new_empty(sum(taken))
        self.all_to_all(output, values.contiguous(), taken, [len(values)] + [0] * (self.world_size - 1))
        return list(torch.split(output, taken)) if self.rank == 0 else []

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """The values of the rank at position `root` everywhere, in place; of any dtype: bytes are what travels."""
        if not tensor.numel():
            return
        values = tensor.detach().contiguous()
        if self._on_device:
            values = values.cuda()  # an optimizer keeps some of its state on the host
        flat = values.view(-1).view(torch.uint8)
        self._run(
            f"rank {self._ranks[root]}'s values",
            lambda: dist.broadcast(flat, group_src=root, group=self._group, async_op=True),
        )
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)

    def maximum(self, number: int) -> int:
        """The largest of the ranks' numbers; returns when all have given theirs."""
        value = torch.tensor([number], dtype=torch.int32)
        self._run(
            "a number from every rank",
            lambda: dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True),
        )
        return int(value)

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Start to give a contiguous tensor to the rank at position `to`. See `StageLinks`; nccl does not know tags.

        Args:
            tensor: one without elements does not travel, at either side.
            tag: from 0; both sides say the same.

        Raises:
            PeerError: the peer is gone, or a rank has failed. InputError, SystemExit: another rank has failed with it.
        """
        return self._transfer(self._group.send, tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Start to fill a contiguous tensor with what the rank at position `source` sends. As `send`."""
        return self._transfer(self._group.recv, tensor, source, tag)

    def abort(self) -> None:
        """End transfers, and what hangs on a device, so that who waits for it goes on; host collectives end alone."""
        if self._on_device and not self._is_aborted:
            self._is_aborted = True
            self._group._get_backend(torch.device("cuda")).abort()
        self.end_transfers()

    def end_transfers(self) -> None:
        """End all host transfers of this rank, and of others with it. Call when this or another rank has failed."""
        if self._on_device or self._is_aborted or not self._has_transfers:
            return
        self._is_aborted = True
        peer = (self.rank + 1) % self.world_size
        with suppress(RuntimeError):  # a receive that runs out of time has gloo close all connections of the group
            self._group.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))

    def find_hang(self) -> PeerError | None:
        """An error if a device exchange is past its deadline; the host never waits for one, so nobody else notices."""
        now_s = time.monotonic()
        while self._pending and self._pending[0][1].is_completed():
            self._pending.popleft()
        if self._pending and now_s - self._pending[0][0] > self._timeout_s:
            return PeerError(self._words("an exchange on the device", "no end"))
        return None

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if self._on_device:
                work.wait()
                self._pending.append((time.monotonic(), work))
            else:
                self._wait(work)
        except RuntimeError as error:
            raise self._error(what, error) from None

    def _transfer(self, start: Callable[[list[Tensor], int, int], Any], tensor: Tensor, peer: int, tag: int) -> Pending:
        if not tensor.numel():
            return _NOTHING
        self._has_transfers = True  # before the look: a failure that is heard of from now on ends this transfer
        end = self._failures.end()
        if end is not None:
            raise end
        try:
            work = start([tensor], peer, tag)
        except RuntimeError as error:
            raise self._error(f"a connection to rank {self._ranks[peer]}", error) from None
        if self._on_device:
            self._pending.append((time.monotonic(), work))
        return _Transfer(self, work, tensor, peer, tag)

    def _transfer_error(self, tensor: Tensor, peer: int, tag: int, error: RuntimeError) -> BaseException:
        return self._error(f"rank {self._ranks[peer]} at the other end of {tensor.numel()} values (tag {tag})", error)

    def _error(self, what: str, error: RuntimeError) -> BaseException:
        """What an exchange that failed ends with."""
        words = self._words(what, _first_words(error))
        return self._failures.end() or self._failures.explain(words) or PeerError(words)

    def _wait(self, work: Any) -> None:
        """Until the host exchange is done. The group's own deadline ends it, so this always returns.

        Raises:
            RuntimeError: the communicator's error.
            PeerError, InputError, SystemExit: another rank has failed in the midst of the wait, or this one has.
        """
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the communicator's own error, if it was not done just now
                    return
            end = self._failures.end()
            if end is not None:
                raise end

    def _words(self, what: str, why: str) -> str:
        return f"{self.name} lane: waited for {what}, at most {self._timeout_s:g} s (run.peer_timeout_s): {why}"


class _Transfer:
    """A transfer under way. Holds the tensor, whose memory is in use."""

    __slots__ = ("_lane", "_peer", "_tag", "_tensor", "_work")

    def __init__(self, lane: LaneGroup, work: Any, tensor: Tensor, peer: int, tag: int) -> None:
        self._lane = lane
        self._work = work
        self._tensor = tensor
        self._peer = peer
        self._tag = tag

    def wait(self) -> None:
        """See `Pending`. Called again, it returns at once."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._lane._transfer_error(self._tensor, self._peer, self._tag, error) from None
        self._work = None


class _Nothing:
    """A transfer of no elements."""

    def wait(self) -> None:
        pass


_NOTHING = _Nothing()


def _first_words(error: RuntimeError) -> str:
    """The communicator's first sentence, without its source file."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2].partition(". ")[0] if line.startswith("[") else line.partition(". ")[0]
