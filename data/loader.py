"""`LookaheadLoader`: serves the rows of a source as batches, made ahead of use, in an order independent of timing.

    segments in epoch order ──tasks──> block readers (bounded in flight) ──Columns in order──> batcher thread
        ──slices of batch_size rows──> Batch ──> BatchQueue (bounded) ──> consumer

Batches do not cross epochs; the last, smaller one of an epoch is served too. The error of a bad block is raised after
all batches made only of earlier rows, and before any row of that block. At the end of what is there of a stream, the
loader waits for more; only where the stream ends is a smaller batch served.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.oracle.plan import RowList
from bagpipe.types.batch import Batch
from data.batch_queue import BatchQueue
from data.batcher import Batcher, BlockOrder
from data.formats import open_eval_source, open_source
from data.row_order import Position, RowIndex, RowRange, split
from data.row_stage import BatchStage, row_stage
from data.source import Segment, Source
from data.stream import Feed, Stream
from data.worker import BlockReaders

__all__ = ["LoaderStatistics", "LookaheadLoader", "open_loader"]

Phase = Literal["train", "eval"]

#: Most batches made ahead. They bridge the gaps between blocks; the oracle keeps its own lookahead window.
BATCHES_AHEAD = 16

#: Segments that tell how far reading is. Those of text have 4 MiB.
_MANY_SEGMENTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """A snapshot of the loader's queues and totals.

    Attributes:
        batches_ready, batches_peak, batches_max: batches waiting for the consumer: now, at most so far, bound.
        consumer_waits: times the consumer found no batch ready; grows steadily if reading is the bottleneck.
        producer_waits: times the batcher found the queue full; grows steadily if the consumer is the bottleneck.
        blocks_in_flight, blocks_peak, blocks_max: blocks being read or queued for it: now, at most so far, bound.
        blocks_read, rows_read: blocks and raw rows read since the loader was opened.
    """

    batches_ready: int
    batches_peak: int
    batches_max: int
    consumer_waits: int
    producer_waits: int
    blocks_in_flight: int
    blocks_peak: int
    blocks_max: int
    blocks_read: int
    rows_read: int


class LookaheadLoader:
    """Serves one phase of a source as batches. Iterate it inside its `with` block.

    The order is a pure function of (seed, epoch, index): file order, or with `shuffle` a random order of segments and
    of the rows of each block (a .gz file is one segment: its blocks stay in order). Evaluation reads the held-out rows,
    or all rows of files of its own, once, in file order, regardless of `epochs` and `shuffle`.

    Args:
        source: the source of the rows.
        batch_size: examples in a batch.
        seed: of the order, when shuffled.
        epochs: passes over the training rows.
        shuffle: visit segments, and the rows of each block, in a random order.
        shuffle_buffer: with shuffle, also mix the rows of consecutive blocks that hold at least so many; 0: do not. An
            error of a bad block is then raised after the batches of the groups before it.
        limit: use only the first so many raw rows; 0: all.
        eval_fraction: share of those rows, the last ones, held out for the phase `eval`; in ``[0, 1)``.
        phase: train or eval.
        own_files: of the phase eval: all rows of the source are for evaluation.
        workers: parser processes; 0 parses in the batcher thread, as do sources that need no process.
        state: a position saved by `state()` under the same settings.
        batches_ahead: bound of the batch queue.
        stage: changes the batches in their order; None: nothing does. It sees all batches if there is no `state`.

    Raises:
        InputError: a setting is out of range, or `state` does not fit. On entry: no data, or the place that `state`
            names in a stream is gone. On iteration: bad data.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        epochs: int = 1,
        shuffle: bool = False,
        shuffle_buffer: int = 0,
        limit: int = 0,
        eval_fraction: float = 0.0,
        phase: Phase = "train",
        own_files: bool = False,
        workers: int = 0,
        state: Mapping[str, Any] | None = None,
        batches_ahead: int = BATCHES_AHEAD,
        stage: BatchStage | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("shuffle_buffer", shuffle_buffer, 0),
            ("limit", limit, 0),
            ("workers", workers, 0),
            ("batches_ahead", batches_ahead, 1),
        ):
            if value < least:
                raise InputError(f"data.{name} must be at least {least}, got {value}")
        if not 0 <= eval_fraction < 1:
            raise InputError(f"data.eval_fraction must be at least 0 and below 1, got {eval_fraction}")
        if phase not in ("train", "eval"):
            raise InputError(f"phase must be train or eval, got {phase!r}")
        if own_files and (phase != "eval" or limit or eval_fraction):
            raise InputError("own_files is of the phase eval, without limit and eval_fraction")
        self._stream = source if isinstance(source, Stream) and phase == "train" else None
        if self._stream is not None and (epochs > 1 or shuffle or eval_fraction):
            raise InputError("a stream is read once, in its order, to its end: without epochs, shuffle, eval_fraction")
        self.source = source
        self._stage = stage
        self._batch_size = batch_size
        self._seed = seed
        self._epochs = epochs if phase == "train" else 1
        self._shuffle = shuffle and phase == "train"
        self._shuffle_buffer = shuffle_buffer if self._shuffle else 0
        self._limit = limit
        self._eval_fraction = eval_fraction
        self.phase: Phase = phase
        self._own_files = own_files
        self._order: dict[str, Any] = {
            "phase": phase,
            "layout": source.layout,
            "batch_size": batch_size,
            "seed": seed if self._shuffle else None,
            "shuffle": self._shuffle,
            "limit": limit,
            "eval_fraction": eval_fraction,
        }
        if self._shuffle_buffer:  # older states have no such key
            self._order["shuffle_buffer"] = self._shuffle_buffer
        if self._stream is not None:
            self._order["stream"] = True
        self._position = Position() if state is None else Position.from_state(state, self._order)
        self._readers = BlockReaders(source, workers if source.in_processes else 0)
        self._queue: BatchQueue[tuple[Batch, Position]] = BatchQueue(batches_ahead)
        self._thread: threading.Thread | None = None
        self._place: Mapping[str, Any] | None = None if state is None else state.get("place")  # where a stream begins
        self._start = self._position
        self._feed: Feed | None = None
        self._batcher: Batcher | None = None
        self._first_share = None if state is None else state.get("share")
        self._num_batches: int | None = None  # of the phase, if its rows are counted
        self._num_segments: int | None = None  # of an epoch, if it reads all of many

    def __enter__(self) -> Self:
        segments = self.source.segments() if self._stream is None else ()
        index, row_range = self._index_and_range(segments)
        if self._stream is not None:
            self._feed = Feed(self._stream, _checked_place(self._place), self._position.segment)
        order = BlockOrder(
            source=self.source,
            segments=segments,
            row_range=row_range,
            index=index,
            seed=self._seed,
            shuffle=self._shuffle,
            shuffle_buffer=self._shuffle_buffer,
            epochs=0 if row_range.high is not None and row_range.high <= row_range.low else self._epochs,
            feed=self._feed,
        )
        self._batcher = Batcher(order, self._readers, self._batch_size)
        if index is not None and row_range.high is not None:
            self._num_batches = -(-(row_range.high - row_range.low) // self._batch_size) * self._epochs
        elif row_range.high is None and len(segments) >= _MANY_SEGMENTS:
            self._num_segments = len(segments)
        self._readers.__enter__()
        self._thread = threading.Thread(
            target=self._run, args=(self._batcher,), name=f"bagpipe-loader-{self.phase}", daemon=True
        )
        self._thread.start()
        return self

    def _index_and_range(self, segments: tuple[Segment, ...]) -> tuple[RowIndex | None, RowRange]:
        """The rows of this phase. Counts rows only if the range depends on their number."""
        if self._own_files:
            return None, RowRange(low=0, high=None)
        if self._eval_fraction == 0 and self.phase == "eval":
            return None, RowRange(low=0, high=0)
        if self._eval_fraction == 0 and not (self._shuffle and self._limit):
            return None, RowRange(low=0, high=self._limit or None)
        index = RowIndex.scan(self.source, segments, self._limit or None)
        rows = min(index.num_rows, self._limit or index.num_rows)
        return index, split(rows, self._eval_fraction, self.phase)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the batcher and the workers and wait for their end. Idempotent."""
        self._queue.close()
        if self._feed is not None:
            self._feed.close()
        self._readers.__exit__()
        if self._thread is not None:
            self._thread.join()
        if self._feed is not None:
            self._feed.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the next batch, or the end, is there, at most so long, or until `wake`. False: it is not."""
        return self._queue.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait`, or the next one. From any thread."""
        self._queue.wake()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._thread is None or self._queue.closed:  # a closed loader must not look exhausted
            raise RuntimeError("use the loader inside its `with` block")
        item = self._queue.get()
        if item is None:
            raise StopIteration
        batch, self._position = item
        if self._stage is not None:
            batch = self._stage(batch)
        return dataclasses.replace(batch, reader_state=self.state())

    def state(self) -> dict[str, Any]:
        """The position after the last batch served, JSON-able. A loader resumed from it serves the rest bit for bit.

        ``share`` is the share of the phase's batches that has been served, if it is known; else None. By counted rows
        (malformed ones included), or by segments, which have similar sizes. Of a stream, ``place`` is that of the
        position's segment (`data.stream.Arrived`).
        """
        state = {**self._position.to_state(self._order), "share": self._share()}
        if self._stream is not None:
            is_moved = self._feed is not None and self._position is not self._start
            state["place"] = self._feed.place(self._position.segment) if self._feed and is_moved else self._place
        return state

    def _share(self) -> float | None:
        position = self._position
        if self._thread is None:
            return self._first_share
        if self._num_batches:
            return min(1.0, position.batch / self._num_batches)
        if self._num_segments:
            return (position.epoch + position.segment / self._num_segments) / self._epochs
        return None

    def skipped_rows(self) -> int:
        """Malformed rows skipped up to the last batch served (counted again in every epoch)."""
        return self._position.skipped

    def statistics(self) -> LoaderStatistics:
        batcher = self._batcher
        return LoaderStatistics(
            batches_ready=len(self._queue),
            batches_peak=self._queue.peak,
            batches_max=self._queue.capacity,
            consumer_waits=self._queue.consumer_waits,
            producer_waits=self._queue.producer_waits,
            blocks_in_flight=batcher.in_flight if batcher else 0,
            blocks_peak=batcher.in_flight_peak if batcher else 0,
            blocks_max=self._readers.max_in_flight,
            blocks_read=batcher.blocks_read if batcher else 0,
            rows_read=batcher.rows_read if batcher else 0,
        )

    def _run(self, batcher: Batcher) -> None:
        """The batcher thread: puts batches into the queue until the end, an error, or `close`."""
        # Worker processes inherit this thread's signal mask. Without it, Ctrl-C in a terminal would end a worker with a
        # traceback before its initializer ignores the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for item in batcher.batches(self._position):
                if not self._queue.put(item):
                    return
            self._queue.finish()
        except BaseException as error:
            # After `close` the consumer reads no more; the error can be a result of the closed pool.
            self._queue.fail(error)


def _checked_place(place: object) -> Mapping[str, Any] | None:
    """The place in a state that can come from a stranger."""
    if place is not None and not isinstance(place, Mapping):
        raise InputError(f"loader state: expected a place in the stream, got {str(place)[:80]}")
    return place


def open_loader(
    config: DataConfig,
    *,
    seed: int,
    phase: Phase = "train",
    state: Mapping[str, Any] | None = None,
    source: Source | None = None,
    known: RowList | None = None,
) -> LookaheadLoader:
    """The loader of a phase as configured, not yet entered.

    Args:
        config: the `data` section.
        seed: of the order, and of synthetic data.
        phase: train or eval.
        state: a position saved by `LookaheadLoader.state`. Ignored where uses of rows are counted, from batch 0.
        source: of the phase, if it is open already.
        known: see `row_stage`.

    Raises:
        InputError: unknown format, missing file, or a setting out of range.
    """
    own_files = phase == "eval" and bool(config.eval_path)
    if source is None:
        source = open_source(config, seed)
        source = (open_eval_source(config, source, seed) if own_files else None) or source
    stage = row_stage(config, source.schema, phase, known)
    return LookaheadLoader(
        source,
        batch_size=config.batch_size,
        seed=seed,
        epochs=config.epochs,
        shuffle=config.shuffle,
        shuffle_buffer=config.shuffle_buffer,
        limit=0 if own_files else config.limit,
        eval_fraction=config.eval_fraction,
        phase=phase,
        own_files=own_files,
        workers=config.workers,
        state=None if stage is not None and phase == "train" else state,
        stage=stage,
    )
