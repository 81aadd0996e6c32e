"""The walk from a position to batches: which blocks to read, ahead of need, and how their rows become batches.

    BlockOrder.tasks ──ReadTask──> readers (bounded in flight) ──Columns in order──> pieces ──batch_size rows──> Batch
                                                                              with the position right after it

A pure function of the order and the position: no thread, no clock. The loader runs it in a thread of its own.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.row_order import Position, RowIndex, Window, segment_order
from data.rows import RowRange, bag_starts, join
from data.source import Columns, Segment, Source
from data.worker import BlockReaders, ReadTask, Shuffle, good_range

__all__ = ["Batcher", "BlockOrder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Which rows are served in which order.

    Attributes:
        source: where they come from.
        segments: all segments of the source.
        window: raw rows to serve.
        index: where segments begin, or None when only the reading tells (file order without a split).
        seed, shuffle: of the order.
        epochs: passes.
    """

    source: Source
    segments: tuple[Segment, ...]
    window: Window
    index: RowIndex | None
    seed: int
    shuffle: bool
    epochs: int

    def tasks(self, start: Position) -> Iterator[ReadTask]:
        """The blocks of the epoch of `start`, from its block on, leaving out those known to be outside the window."""
        numbers = list(range(len(self.segments))) if self.index is None else self.index.overlapping(self.window)
        order = segment_order(numbers, self.seed, start.epoch, self.shuffle)
        for place in range(start.segment, len(order)):
            first_block = start.block if place == start.segment else 0
            yield from self._segment_tasks(start.epoch, place, order[place], first_block)

    def _segment_tasks(self, epoch: int, place: int, segment: int, first_block: int) -> Iterator[ReadTask]:
        first_row = None if self.index is None else self.index.first_rows[segment]
        for number, block in enumerate(self.source.blocks(self.segments[segment])):
            rows = block.num_rows
            if rows is None and self.index is not None:
                rows = self.index.first_rows[segment + 1] - self.index.first_rows[segment]
            outside = first_row is not None and rows is not None and not self.window.overlaps(first_row, rows)
            if number >= first_block and not outside:
                shuffle = None
                if self.shuffle:
                    low, high = 0, None
                    if first_row is not None and rows is not None:
                        low, high = self.window.within(first_row, rows)
                    shuffle = Shuffle(seed=self.seed, epoch=epoch, segment=segment, low=low, high=high)
                yield ReadTask(segment=place, number=number, first_row=first_row, block=block, shuffle=shuffle)
            first_row = None if first_row is None or rows is None else first_row + rows
            if first_row is not None and self.window.high is not None and first_row >= self.window.high:
                return
        counted = None if self.index is None else self.index.first_rows[segment + 1]
        if counted is not None and first_row is not None and first_row < counted:
            raise InputError(
                f"{self.segments[segment].file}: expected {counted - first_row} more rows, as when they were counted: "
                f"the file changed while it was read"
            )


class Batcher:
    """Makes batches with the positions after them; its counters are read by the loader's statistics."""

    def __init__(self, order: BlockOrder, readers: BlockReaders, batch_size: int) -> None:
        self._order = order
        self._readers = readers
        self._batch_size = batch_size
        self.in_flight = 0
        self.in_flight_peak = 0
        self.blocks_read = 0
        self.rows_read = 0
        self._rows_before = 0  # raw rows of the epoch before, where nobody counted them

    def batches(self, start: Position) -> Iterator[tuple[Batch, Position]]:
        """All batches after `start`, each with the position after it.

        Raises:
            InputError: a bad block, after all batches made wholly of earlier rows; or an epoch without a good row.
        """
        while start.epoch < self._order.epochs:
            start = yield from self._epoch(start)

    def _epoch(self, start: Position) -> Generator[tuple[Batch, Position], None, Position]:
        """The batches left in an epoch; returns where the next epoch begins."""
        window = self._order.window
        here = following = start
        pieces: list[RowRange] = []
        for task, columns in self._columns(start):
            first_row = following.first_row if task.first_row is None else task.first_row
            low, high = window.within(first_row, columns.num_raw_rows)
            first, last = good_range(columns, low, high)
            here = dataclasses.replace(
                following,
                segment=task.segment,
                block=task.number,
                first_row=first_row,
                skipped=following.skipped_before + (high - low) - (last - first),
            )
            if task.shuffle is not None:  # only the rows to serve were sent, in serving order
                first, last = 0, columns.num_rows
            starts = bag_starts(columns.lengths)
            while first + here.row < last:
                low = first + here.row
                high = min(low + self._batch_size - sum(map(len, pieces)), last)
                pieces.append(RowRange(columns, starts, low, high))
                here = dataclasses.replace(here, row=here.row + high - low)
                if sum(map(len, pieces)) == self._batch_size:
                    here = dataclasses.replace(here, batch=here.batch + 1)
                    yield join(here.batch - 1, pieces), here
                    pieces = []
            following = dataclasses.replace(
                here, row=0, first_row=first_row + columns.num_raw_rows, skipped_before=here.skipped
            )
            if self._order.index is None and window.high is not None and following.first_row >= window.high:
                break
        self._check_rows(following.first_row)
        if pieces:
            here = dataclasses.replace(here, batch=here.batch + 1)
            yield join(here.batch - 1, pieces), here
        self._check_served(start, here)
        skipped = here.skipped
        return Position(epoch=start.epoch + 1, batch=here.batch, skipped=skipped, skipped_before=skipped)

    def _check_rows(self, rows: int) -> None:
        """An epoch ended after so many raw rows. Without an index only the one before tells how many there must be."""
        if self._order.index is not None:
            return
        rows = self._order.window.within(0, rows)[1]
        if rows < self._rows_before:
            raise InputError(
                f"{self._order.segments[-1].file} or a file before it: expected {self._rows_before - rows} more rows, "
                f"as in the epoch before: the file changed while it was read"
            )
        self._rows_before = rows

    def _check_served(self, start: Position, end: Position) -> None:
        from_the_top = (start.segment, start.block, start.row) == (0, 0, 0)
        if from_the_top and end.batch == start.batch and end.skipped > start.skipped:
            bad = end.skipped - start.skipped
            raise InputError(
                f"{self._order.segments[0].file}: expected at least one good row, got {bad} malformed rows"
            )

    def _columns(self, start: Position) -> Iterator[tuple[ReadTask, Columns]]:
        """The epoch's blocks in order; reads run ahead of their use. An error takes its turn like a block."""
        tasks = self._order.tasks(start)
        waiting: deque[tuple[ReadTask | None, Callable[[], Columns]]] = deque()
        ended = False
        while True:
            while not ended and len(waiting) < self._readers.max_in_flight:
                try:
                    task = next(tasks, None)
                except InputError as error:  # the file cannot be read further: after the blocks before
                    waiting.append((None, _raiser(error)))
                    task = None
                ended = task is None
                if task is not None:
                    waiting.append((task, self._readers.submit(task)))
            self.in_flight = len(waiting)
            self.in_flight_peak = max(self.in_flight_peak, len(waiting))
            if not waiting:
                return
            task, result = waiting.popleft()
            columns = result()
            assert task is not None, "an entry without a task raises"
            self.blocks_read += 1
            self.rows_read += columns.num_raw_rows
            yield task, columns


def _raiser(error: InputError) -> Callable[[], Columns]:
    def fail() -> Columns:
        raise error

    return fail
