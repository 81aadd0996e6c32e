"""`LookaheadLoader`: the rows of a source as batches, made ahead of use, in an order that never depends on timing.

    segments in epoch order ──tasks──> block readers (bounded in flight) ──Columns in order──> assembler thread
        ──pieces of batch_size rows──> Batch ──> BatchQueue (bounded) ──> consumer

Batches do not cross epochs; the last, smaller one of an epoch is served too. A bad block raises its error after all
batches made wholly of earlier rows have been served, and before any row of its own.
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
from bagpipe.types.batch import Batch
from data.batch_queue import BatchQueue
from data.batcher import Batcher, BlockOrder
from data.formats import open_source
from data.row_order import Position, RowIndex, Window, split
from data.source import Segment, Source
from data.worker import BlockReaders

__all__ = ["LoaderStatistics", "LookaheadLoader", "open_loader"]

Phase = Literal["train", "eval"]

#: Batches made ahead at most. They only bridge the gaps between blocks: whoever looks further keeps its own window.
BATCHES_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """The loader's queues and totals at one moment.

    Attributes:
        batches_ready, batches_peak, batches_max: batches waiting for the consumer: now, at most so far, bound.
        consumer_waits: times the consumer found no batch ready: grows steadily when reading is the bottleneck.
        producer_waits: times the assembler found the buffer full: grows steadily when it is not.
        blocks_in_flight, blocks_peak, blocks_max: blocks being read or waiting to be: now, at most so far, bound.
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

    The order is a pure function of (seed, epoch, index): file order, or with `shuffle` segments in a drawn order and
    the rows of each block in a drawn order (a .gz file is one segment: its blocks stay in order). Evaluation reads the
    held-out rows once, in file order, whatever `epochs` and `shuffle` say.

    Args:
        source: where rows come from.
        batch_size: examples in a batch.
        seed: of the order, when shuffled.
        epochs: passes over the training rows.
        limit: use only the first so many raw rows; 0: all.
        eval_fraction: share of those rows, the last ones, held out for the phase `eval`; in ``[0, 1)``.
        phase: train or eval.
        workers: parser processes; 0 parses in the assembler thread, as do sources that need no process.
        state: a position saved by `state()` under the same settings.
        batches_ahead: bound of the batch buffer.

    Raises:
        InputError: a setting is out of range, or `state` does not fit. Entering: no data. Iterating: bad data.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        epochs: int = 1,
        shuffle: bool = False,
        limit: int = 0,
        eval_fraction: float = 0.0,
        phase: Phase = "train",
        workers: int = 0,
        state: Mapping[str, Any] | None = None,
        batches_ahead: int = BATCHES_AHEAD,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
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
        self.source = source
        self._batch_size = batch_size
        self._seed = seed
        self._epochs = epochs if phase == "train" else 1
        self._shuffle = shuffle and phase == "train"
        self._limit = limit
        self._eval_fraction = eval_fraction
        self._phase: Phase = phase
        self._order: dict[str, Any] = {
            "phase": phase,
            "layout": source.layout,
            "batch_size": batch_size,
            "seed": seed if self._shuffle else None,
            "shuffle": self._shuffle,
            "limit": limit,
            "eval_fraction": eval_fraction,
        }
        self._position = Position() if state is None else Position.from_state(state, self._order)
        self._readers = BlockReaders(source, workers if source.in_processes else 0)
        self._buffer: BatchQueue[tuple[Batch, Position]] = BatchQueue(batches_ahead)
        self._thread: threading.Thread | None = None
        self._assembler: Batcher | None = None

    def __enter__(self) -> Self:
        segments = self.source.segments()
        index, window = self._index_and_window(segments)
        order = BlockOrder(
            source=self.source,
            segments=segments,
            window=window,
            index=index,
            seed=self._seed,
            shuffle=self._shuffle,
            epochs=0 if window.high is not None and window.high <= window.low else self._epochs,
        )
        self._assembler = Batcher(order, self._readers, self._batch_size)
        self._readers.__enter__()
        self._thread = threading.Thread(
            target=self._run, args=(self._assembler,), name=f"bagpipe-loader-{self._phase}", daemon=True
        )
        self._thread.start()
        return self

    def _index_and_window(self, segments: tuple[Segment, ...]) -> tuple[RowIndex | None, Window]:
        """The rows of this phase; counts rows only where the answer depends on their number."""
        if self._eval_fraction == 0 and self._phase == "eval":
            return None, Window(low=0, high=0)
        if self._eval_fraction == 0 and not (self._shuffle and self._limit):
            return None, Window(low=0, high=self._limit or None)
        index = RowIndex.scan(self.source, segments, self._limit or None)
        rows = min(index.num_rows, self._limit or index.num_rows)
        return index, split(rows, self._eval_fraction, self._phase)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the assembler and the workers, and wait until they are gone. Harmless when called again."""
        self._buffer.close()
        self._readers.__exit__()
        if self._thread is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._thread is None or self._buffer.closed:  # after `close`, too: a part of the rows is not all of them
            raise RuntimeError("use the loader inside its `with` block")
        item = self._buffer.get()
        if item is None:
            raise StopIteration
        batch, self._position = item
        return dataclasses.replace(batch, reader_state=self.state())

    def state(self) -> dict[str, Any]:
        """The position after the last batch served, JSON-able; a loader given it serves the rest, bit for bit."""
        return self._position.to_state(self._order)

    def skipped_rows(self) -> int:
        """Malformed rows left out up to the last batch served (every epoch counts them again)."""
        return self._position.skipped

    def statistics(self) -> LoaderStatistics:
        assembler = self._assembler
        return LoaderStatistics(
            batches_ready=len(self._buffer),
            batches_peak=self._buffer.peak,
            batches_max=self._buffer.capacity,
            consumer_waits=self._buffer.consumer_waits,
            producer_waits=self._buffer.producer_waits,
            blocks_in_flight=assembler.in_flight if assembler else 0,
            blocks_peak=assembler.in_flight_peak if assembler else 0,
            blocks_max=self._readers.max_in_flight,
            blocks_read=assembler.blocks_read if assembler else 0,
            rows_read=assembler.rows_read if assembler else 0,
        )

    def _run(self, assembler: Batcher) -> None:
        """The assembler thread: batches into the buffer until the end, an error, or `close`."""
        # Worker processes are started from this thread and inherit its mask: Ctrl-C in a terminal goes to them too, and
        # one that is still starting would end with a traceback before its initializer could ignore the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for item in assembler.batches(self._position):
                if not self._buffer.put(item):
                    return
            self._buffer.finish()
        except BaseException as error:
            # after `close` nobody asks, and the error may be no more than the pool shut down under our hands
            self._buffer.fail(error)


def open_loader(
    config: DataConfig,
    *,
    seed: int,
    phase: Phase = "train",
    state: Mapping[str, Any] | None = None,
    source: Source | None = None,
) -> LookaheadLoader:
    """The loader of a phase as the configuration describes it, not entered yet.

    Raises:
        InputError: unknown format, missing file, or a setting out of range.
    """
    return LookaheadLoader(
        open_source(config, seed) if source is None else source,
        batch_size=config.batch_size,
        seed=seed,
        epochs=config.epochs,
        shuffle=config.shuffle,
        limit=config.limit,
        eval_fraction=config.eval_fraction,
        phase=phase,
        workers=config.workers,
        state=state,
    )
