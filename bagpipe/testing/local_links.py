"""`Mail`: tensor transfers between ranks in threads. As in gloo, a transfer completes when both sides have started it.

send    ─> waiting receive? filled : queued      by (sender, receiver, tag), in the order of the calls
receive ─> queued tensor?   taken  : queued      the later side makes the copy
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from torch import Tensor

from bagpipe.distributed.interface import Pending
from bagpipe.errors import PeerError

__all__ = ["LocalLinks", "Mail"]


class _Transfer:
    """One side of a transfer."""

    def __init__(self, mail: Mail, tensor: Tensor, words: str) -> None:
        self._mail = mail
        self._words = words
        self.tensor = tensor
        self.is_done = False

    def wait(self) -> None:
        """See `Pending`."""
        self._mail.wait(self, self._words)


class Mail:
    """All transfers of a job. Thread-safe.

    Args:
        timeout_s: deadline of a wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # At most one of the two queues of a key has entries. Their number is bounded by the schedule's transfers in
        # flight.
        self._sent: dict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)
        self._wanted: dict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)
        self._is_closed = False

    def send(self, key: tuple[int, int, int], tensor: Tensor) -> Pending:
        """Start sending a tensor; `key` is (sender, receiver, tag). See `StageLinks`."""
        transfer = _Transfer(self, tensor, f"rank {key[1]} to take {tensor.numel()} values (tag {key[2]})")
        with self._changed:
            if not tensor.numel():
                transfer.is_done = True
            elif self._wanted[key]:
                self._match(transfer, self._wanted[key].popleft())
            else:
                self._sent[key].append(transfer)
        return transfer

    def receive(self, key: tuple[int, int, int], tensor: Tensor) -> Pending:
        """Start receiving into a tensor; `key` as in `send`."""
        transfer = _Transfer(self, tensor, f"{tensor.numel()} values of rank {key[0]} (tag {key[2]})")
        with self._changed:
            if not tensor.numel():
                transfer.is_done = True
            elif self._sent[key]:
                self._match(self._sent[key].popleft(), transfer)
            else:
                self._wanted[key].append(transfer)
        return transfer

    def wait(self, transfer: _Transfer, words: str) -> None:
        """Wait until a transfer is done.

        Raises:
            PeerError: a rank has failed, or the deadline has passed.
        """
        end_s = time.monotonic() + self._timeout_s
        with self._changed:
            while not transfer.is_done:
                if self._is_closed:
                    raise PeerError(f"another rank failed (links: waited for {words})")
                if not self._changed.wait(end_s - time.monotonic()):
                    raise PeerError(f"links: waited for {words}, at most {self._timeout_s:g} s")

    def close(self) -> None:
        """End all waits with PeerError because a rank has failed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _match(self, sent: _Transfer, wanted: _Transfer) -> None:
        if sent.tensor.shape != wanted.tensor.shape:
            raise PeerError(f"expected shape {list(wanted.tensor.shape)}, got {list(sent.tensor.shape)}")
        wanted.tensor.detach().copy_(sent.tensor.detach())
        sent.is_done = wanted.is_done = True
        self._changed.notify_all()


class LocalLinks:
    """`bagpipe.distributed.interface.StageLinks` of one rank.

    Args:
        mail: transfers of the job.
        rank: this rank.
        first_rank: first rank of this pipeline replica.
    """

    def __init__(self, mail: Mail, rank: int, first_rank: int) -> None:
        self._mail = mail
        self._rank = rank
        self._first_rank = first_rank

    def send(self, process: int, tag: int, tensor: Tensor) -> Pending:
        return self._mail.send((self._rank, self._first_rank + process, tag), tensor)

    def receive(self, process: int, tag: int, tensor: Tensor) -> Pending:
        return self._mail.receive((self._first_rank + process, self._rank, tag), tensor)
