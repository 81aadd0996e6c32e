"""`Batcher`: walks from a position through blocks to batches, and reads blocks ahead of their use.

    BlockOrder.tasks ──ReadTask──> readers (bounded in flight) ──Columns in order──> parts ──batch_size rows──> Batch
                                                            (mixed with a shuffle buffer)   and the position after it

A function of the order and the position alone: no thread, no clock. The loader runs it in a thread. The segments of a
stream come from its feed; where none has arrived, the batcher waits once it has nothing to read.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.bad_row_limit import BadRowLimit
from data.columns import Columns, RowSlice, bag_starts, join, join_distances
from data.next_use_batches import BatchUses
from data.next_use_mark import NextUseMark
from data.row_order import Position, RowIndex, RowRange, segment_order
from data.shuffle_buffer import Part, mixed
from data.source import Segment, Source
from data.stream import Feed
from data.worker import BlockReaders, ReadTask, Shuffle, good_range

__all__ = ["Batcher", "BlockOrder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The rows to serve and their order.

    Attributes:
        source: the source of the rows.
        segments: all segments of the source.
        row_range: raw rows to serve.
        index: first row of every segment; None if rows are not counted beforehand (file order without a split).
        seed, shuffle: of the order.
        shuffle_buffer: mix the rows of consecutive blocks that hold at least so many; 0: only those of each block.
        epochs: passes.
        feed: of a stream, in file order and without an index: the segments that arrive, in the place of `segments`.
    """

    source: Source
    segments: tuple[Segment, ...]
    row_range: RowRange
    index: RowIndex | None
    seed: int
    shuffle: bool
    epochs: int
    shuffle_buffer: int = 0
    feed: Feed | None = None

    def tasks(self, start: Position) -> Iterator[ReadTask | None]:
        """The blocks of the epoch of `start`, from its block on, without those known to lie outside the row range.

        None: the next one has not arrived. Ask again later.
        """
        if self.feed is not None:
            return self._arriving(self.feed, start)
        return self._present(start)

    @property
    def name(self) -> str:
        """Of the data, in messages: its first file, or the stream."""
        return self.segments[0].file if self.feed is None else self.feed.name

    def _arriving(self, feed: Feed, start: Position) -> Iterator[ReadTask | None]:
        first_block = start.block
        while True:
            arrived = feed.poll()
            if arrived is None and feed.is_over:
                return
            if arrived is None:
                yield None
                continue
            ordinal, segment = arrived
            number = -1
            for number, block in enumerate(feed.blocks(segment)):
                if number >= first_block:
                    yield ReadTask(segment=ordinal, number=number, first_row=None, block=block, shuffle=None)
            if number < first_block:
                raise InputError(f"loader state: {segment.file} has no block {first_block}")
            first_block = 0

    def _present(self, start: Position) -> Iterator[ReadTask]:
        numbers = list(range(len(self.segments))) if self.index is None else self.index.overlapping(self.row_range)
        order = segment_order(numbers, self.seed, start.epoch, self.shuffle)
        if start.segment and start.segment >= len(order):
            raise InputError(f"loader state: expected a segment below {len(order)}, got {start.segment}")
        for ordinal in range(start.segment, len(order)):
            first_block = start.block if ordinal == start.segment else 0
            yield from self._segment_tasks(start.epoch, ordinal, order[ordinal], first_block)

    def batch_uses(self, batch_size: int) -> BatchUses | None:
        """What tells the next uses of the batches; None if the source does not read them."""
        mark = getattr(self.source, "next_uses", None)
        if not isinstance(mark, NextUseMark):
            return None
        low, high = self.row_range.within(0, mark.num_rows)
        return BatchUses(cycle=mark.train_rows, rows=high - low, batch_size=batch_size, epochs=self.epochs)

    def _segment_tasks(self, epoch: int, ordinal: int, segment: int, first_block: int) -> Iterator[ReadTask]:
        first_row = None if self.index is None else self.index.first_rows[segment]
        number = -1
        for number, block in enumerate(self.source.blocks(self.segments[segment])):
            rows = block.num_rows
            if rows is None and self.index is not None:
                rows = self.index.first_rows[segment + 1] - self.index.first_rows[segment]
            outside = first_row is not None and rows is not None and not self.row_range.overlaps(first_row, rows)
            if number >= first_block and not outside:
                shuffle = None
                if self.shuffle:
                    low, high = 0, None
                    if first_row is not None and rows is not None:
                        low, high = self.row_range.within(first_row, rows)
                    shuffle = Shuffle(seed=self.seed, epoch=epoch, segment=segment, low=low, high=high)
                if epoch and getattr(self.source, "reads_by_epoch", False):
                    block = dataclasses.replace(block, epoch=epoch)
                yield ReadTask(segment=ordinal, number=number, first_row=first_row, block=block, shuffle=shuffle)
            first_row = None if first_row is None or rows is None else first_row + rows
            if first_row is not None and self.row_range.high is not None and first_row >= self.row_range.high:
                return
        if number < first_block:
            raise InputError(f"loader state: {self.segments[segment].file} has no block {first_block}")
        counted = None if self.index is None else self.index.first_rows[segment + 1]
        if counted is not None and first_row is not None and first_row < counted:
            raise InputError(
                f"{self.segments[segment].file}: expected {counted - first_row} more rows, as first counted: "
                f"the file changed while it was read"
            )


class Batcher:
    """Makes batches and the positions after them. `LookaheadLoader.statistics` reads its counters."""

    def __init__(self, order: BlockOrder, readers: BlockReaders, batch_size: int) -> None:
        self._order = order
        self._readers = readers
        self._batch_size = batch_size
        self.in_flight = 0
        self.in_flight_peak = 0
        self.blocks_read = 0
        self.rows_read = 0
        self._bad_rows = BadRowLimit(order.source)
        self._uses = order.batch_uses(batch_size)
        self._rows_before = 0  # raw rows of the previous epoch, if there is no index

    def batches(self, start: Position) -> Iterator[tuple[Batch, Position]]:
        """All batches after `start`, each with the position after it.

        Raises:
            InputError: a bad block, after all batches made only of earlier rows; or an epoch without a good row.
        """
        while start.epoch < self._order.epochs:
            start = yield from self._epoch(start)

    def _epoch(self, start: Position) -> Generator[tuple[Batch, Position], None, Position]:
        """The remaining batches of an epoch; returns the start of the next epoch."""
        row_range = self._order.row_range
        here = following = start
        pieces: list[RowSlice] = []
        for part in self._parts(start):
            here = dataclasses.replace(
                following,
                segment=part.segment,
                block=part.block,
                first_row=part.first_row,
                skipped=following.skipped_before + part.skipped,
            )
            if here.row > part.last - part.first:
                raise InputError(
                    f"loader state: expected at most {part.last - part.first} rows of block {here.block} of segment "
                    f"{here.segment}, got {here.row}"
                )
            starts = bag_starts(part.columns.lengths)
            while part.first + here.row < part.last:
                low = part.first + here.row
                high = min(low + self._batch_size - sum(map(len, pieces)), part.last)
                pieces.append(RowSlice(part.columns, starts, low, high))
                here = dataclasses.replace(here, row=here.row + high - low)
                if sum(map(len, pieces)) == self._batch_size:
                    here = dataclasses.replace(here, batch=here.batch + 1)
                    yield self._batch(here.batch - 1, pieces, start.epoch), here
                    pieces = []
            following = dataclasses.replace(here, row=0, first_row=part.end_row, skipped_before=here.skipped)
            if self._order.index is None and row_range.high is not None and following.first_row >= row_range.high:
                break
        self._check_rows(following.first_row)
        if pieces:
            here = dataclasses.replace(here, batch=here.batch + 1)
            yield self._batch(here.batch - 1, pieces, start.epoch), here
        self._check_served(start, here)
        skipped = here.skipped
        return Position(epoch=start.epoch + 1, batch=here.batch, skipped=skipped, skipped_before=skipped)

    def _batch(self, index: int, pieces: list[RowSlice], epoch: int) -> Batch:
        batch = join(index, pieces)
        distances = None if self._uses is None else join_distances(pieces)
        if self._uses is None or distances is None:
            return batch
        return dataclasses.replace(batch, next_use=self._uses.of(batch, epoch, distances))

    def _parts(self, start: Position) -> Iterator[Part]:
        """The epoch's rows from the block of `start` on: block by block, or mixed in groups of blocks."""
        order = self._order
        blocks = self._blocks(start)
        return mixed(blocks, order.shuffle_buffer, order.seed, start.epoch) if order.shuffle_buffer else blocks

    def _blocks(self, start: Position) -> Iterator[Part]:
        next_row = start.first_row
        for task, columns in self._columns(start):
            first_row = next_row if task.first_row is None else task.first_row
            low, high = self._order.row_range.within(first_row, columns.num_raw_rows)
            first, last = good_range(columns, low, high)
            skipped = (high - low) - (last - first)
            if task.shuffle is not None:  # the reader sent only the rows to serve, in serving order
                first, last = 0, columns.num_rows
            next_row = first_row + columns.num_raw_rows
            yield Part(
                segment=task.segment,
                block=task.number,
                file_segment=task.segment if task.shuffle is None else task.shuffle.segment,
                first_row=first_row,
                end_row=next_row,
                columns=columns,
                first=first,
                last=last,
                skipped=skipped,
            )

    def _check_rows(self, rows: int) -> None:
        """Check the raw rows of a finished epoch. Without an index the previous epoch tells the expected number."""
        if self._order.index is not None:
            return
        rows = self._order.row_range.within(0, rows)[1]
        if rows < self._rows_before:
            raise InputError(
                f"{self._order.segments[-1].file} or a file before it: expected {self._rows_before - rows} more rows, "
                f"as in the previous epoch: the file changed while it was read"
            )
        self._rows_before = rows

    def _check_served(self, start: Position, end: Position) -> None:
        from_the_top = (start.segment, start.block, start.row) == (0, 0, 0)
        if from_the_top and end.batch == start.batch and end.skipped > start.skipped:
            bad = end.skipped - start.skipped
            raise InputError(f"{self._order.name}: expected at least one good row, got {bad} malformed rows")

    def _columns(self, start: Position) -> Iterator[tuple[ReadTask, Columns]]:
        """The epoch's blocks in order, read ahead. An error is raised in the order of the blocks."""
        tasks = self._order.tasks(start)
        waiting: deque[tuple[ReadTask | None, Callable[[], Columns]]] = deque()
        ended = False
        while True:
            while not ended and len(waiting) < self._readers.max_in_flight:
                try:
                    task = next(tasks)
                except StopIteration:
                    ended = True
                except InputError as error:  # raised after the blocks before it
                    waiting.append((None, _raiser(error)))
                    ended = True
                else:
                    if task is None:
                        break  # it has not arrived
                    waiting.append((task, self._readers.submit(task)))
            self.in_flight = len(waiting)
            self.in_flight_peak = max(self.in_flight_peak, len(waiting))
            if not waiting and ended:
                return
            if not waiting:
                assert self._order.feed is not None, "only the segments of a stream arrive"
                self._order.feed.wait()
                continue
            task, result = waiting.popleft()
            columns = result()
            assert task is not None, "the result of an entry without a task raises"
            self.blocks_read += 1
            self.rows_read += columns.num_raw_rows
            self._bad_rows.check(task.block, columns.num_raw_rows, columns.bad_rows)
            yield task, columns


def _raiser(error: InputError) -> Callable[[], Columns]:
    def fail() -> Columns:
        raise error

    return fail
