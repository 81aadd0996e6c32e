"""`LaneGroup`: collective exchanges of one process group, with a deadline and errors that name lane, peer and reason.

start (async) ─> host: wait, at times looking whether a rank has failed         ─> done, or PeerError
              └> device: the current stream waits, the thread does not; `find_hang` watches from outside
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagpipe.errors import PeerError
from bagpipe.peers.failure import Failures

__all__ = ["LaneGroup"]

#: How often a waiting thread looks whether a rank, another or this one, has failed meanwhile.
_POLL = timedelta(seconds=0.25)
#: Device exchanges remembered for `find_hang`; a lane has fewer under way, since batches are bounded.
_MAX_PENDING = 64
#: torch 2.13 renamed it, and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LaneGroup:
    """One lane's communicator. Calls come from one thread, except `abort` and `find_hang`.

    Args:
        name: for error messages.
        group: of all ranks, in their order.
        rank: this one.
        timeout_s: deadline of one exchange; that of the group.
        failures: asked for the reason when an exchange fails.
    """

    def __init__(self, *, name: str, group: dist.ProcessGroup, rank: int, timeout_s: float, failures: Failures) -> None:
        self.name = name
        self.rank = rank
        self.world_size = group.size()
        self._group = group
        self._timeout_s = timeout_s
        self._failures = failures
        self._on_device = dist.get_backend(group) == "nccl"
        self._is_aborted = False
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

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values everywhere, in place; of any dtype, since bytes are what travels."""
        if not tensor.numel():
            return
        values = tensor.detach().contiguous()
        flat = values.view(-1).view(torch.uint8)
        self._run("rank 0's values", lambda: dist.broadcast(flat, 0, group=self._group, async_op=True))
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

    def abort(self) -> None:
        """End device exchanges that hang, so that what waits for the device goes on; host ones end by themselves."""
        if self._on_device and not self._is_aborted:
            self._is_aborted = True
            self._group._get_backend(torch.device("cuda")).abort()

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
            words = self._words(what, _first_words(error))
            raise self._failures.explain(words) or PeerError(words) from None

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


def _first_words(error: RuntimeError) -> str:
    """The communicator's first sentence, without its source file."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2].partition(". ")[0] if line.startswith("[") else line.partition(". ")[0]
