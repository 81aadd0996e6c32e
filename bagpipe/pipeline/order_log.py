"""`OrderLog`: the orders that the lanes of a process are given, and those that they take, kept in files on disk.

    Orders ──given──> lane        lane ──taken──> temporary file, a record per batch ──blocks──> lines

Memory holds no order that is taken down. A lane writes to a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import IO

from bagpipe.schedule.formats.order_text import OrderKey, Orders
from bagpipe.util.temporary_folder import temporary_file

__all__ = ["LaneLog", "OrderLog"]

_BATCH_BYTES = 8


class LaneLog:
    """One lane's orders, a `LaneOrder`.

    Args:
        replica, rank: whose order it is.
        num_actions: actions of a batch.
        orders: orders to repeat; None: the lane chooses.
        records: take down what it does.
    """

    def __init__(self, *, replica: int, rank: int, num_actions: int, orders: Orders | None, records: bool) -> None:
        self._replica = replica
        self._rank = rank
        self._record_bytes = _BATCH_BYTES + num_actions
        self._orders = orders
        self._records = records
        self._file: IO[bytes] | None = None

    def given(self, batch: int) -> Sequence[int] | None:
        return None if self._orders is None else self._orders.get((batch, self._replica, self._rank))

    def taken(self, batch: int, tracks: Sequence[int]) -> None:
        if self._file is not None:
            self._file.write(batch.to_bytes(_BATCH_BYTES, "little") + bytes(tracks))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take down orders from now on, if they are recorded; at the end forget them. The lane has ended then."""
        if not self._records:
            yield
            return
        with temporary_file() as file:
            self._file = file
            try:
                yield
            finally:
                self._file = None

    def records(self) -> Iterator[tuple[OrderKey, bytes]]:
        """What has been taken, in the order of batches. The lane has ended."""
        if self._file is None:
            return
        self._file.seek(0)
        while record := self._file.read(self._record_bytes):
            batch = int.from_bytes(record[:_BATCH_BYTES], "little")
            yield (batch, self._replica, self._rank), record[_BATCH_BYTES:]


class OrderLog:
    """The lanes of a process that choose their order. Context manager: they are recorded until its end.

    Args:
        lanes: lane -> pipeline rank.
        replica: of the process.
        num_actions: actions of a batch on one lane.
        orders: orders to repeat; None: the lanes choose.
        records: take down what they do.
    """

    def __init__(
        self, *, lanes: Mapping[str, int], replica: int, num_actions: int, orders: Orders | None, records: bool
    ) -> None:
        self.lanes: Mapping[str, LaneLog] = {
            lane: LaneLog(replica=replica, rank=rank, num_actions=num_actions, orders=orders, records=records)
            for lane, rank in lanes.items()
        }
        self._stack = ExitStack()

    def __enter__(self) -> OrderLog:
        for lane in self.lanes.values():
            self._stack.enter_context(lane.opened())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batches(self) -> Iterator[list[tuple[OrderKey, bytes]]]:
        """Batch by batch, what the lanes have taken. They have ended."""
        for taken in zip_longest(*(lane.records() for lane in self.lanes.values())):
            yield [record for record in taken if record is not None]
