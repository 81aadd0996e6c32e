"""The parser process and the pool of parser processes. Imports no torch.

    loader ──ReadTask──> worker: read_checked, select and permute rows ──Columns──> loader

Workers ignore Ctrl-C, because the loader stops them, and exit when their parent is gone.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from bagpipe.errors import InputError, JobError
from bagpipe.files.access import pin, pins
from bagpipe.files.version import FileVersion
from bagpipe.util.parent_process import end_with_parent
from data.checked_read import read_checked
from data.columns import Columns, take_rows
from data.row_order import row_permutation
from data.source import Block, Source

__all__ = ["BlockReaders", "ReadTask", "good_range", "read_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Seeds of a block's row order, and the raw rows of the block to serve: ``[low, high)`` (None: all)."""

    seed: int
    epoch: int
    segment: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """One block to read.

    Attributes:
        segment: index of its segment in the epoch's order.
        number: its number in the segment.
        first_row: raw row number of its first row; None if not yet known.
        block: the block.
        shuffle: None serves all rows in order.
    """

    segment: int
    number: int
    first_row: int | None
    block: Block
    shuffle: Shuffle | None


def good_range(columns: Columns, low: int, high: int) -> tuple[int, int]:
    """Convert raw rows ``[low, high)`` of a block to a range of its good rows."""
    bad = np.searchsorted(columns.bad_rows, [low, high])
    return low - int(bad[0]), high - int(bad[1])


def read_task(source: Source, task: ReadTask) -> Columns:
    """Read a block; if shuffled, return only the rows to serve, in serving order."""
    columns = read_checked(source, task.block)
    how = task.shuffle
    if how is None:
        return columns
    high = columns.num_raw_rows if how.high is None else how.high
    low, high = good_range(columns, how.low, high)
    return take_rows(columns, low + row_permutation(high - low, how.seed, how.epoch, how.segment, task.number))


_source: Source | None = None


def _start_worker(source: Source, versions: Mapping[str, FileVersion]) -> None:
    global _source
    _source = source
    pin(versions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def _read(task: ReadTask) -> Columns:
    assert _source is not None, "the pool's initializer sets the source"
    return read_task(_source, task)


class BlockReaders:
    """Reads blocks in `workers` processes, or in the calling thread if there are none. Use as a context manager."""

    def __init__(self, source: Source, workers: int) -> None:
        self._source = source
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    @property
    def max_in_flight(self) -> int:
        """Useful number of blocks in flight: per worker one read and one waiting, and one being sent."""
        return 2 * self._workers + 1 if self._workers else 1

    def __enter__(self) -> BlockReaders:
        if self._workers:
            # spawn: the parent has threads and possibly CUDA, and a forked child inherits their locks
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._source, pins(self._source.files)),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def submit(self, task: ReadTask) -> Callable[[], Columns]:
        """Start reading; the returned function waits for the columns."""
        if self._pool is None:
            return lambda: read_task(self._source, task)
        try:
            future = self._pool.submit(_read, task)
        except BrokenProcessPool:
            raise JobError("a parser process ended unexpectedly") from None
        return lambda: _result(future)


def _result(future: Future[Columns]) -> Columns:
    try:
        return future.result()
    except InputError as error:
        # Drops the worker's traceback, which the executor attaches as the cause.
        raise InputError(str(error)) from None
    except BrokenProcessPool:
        raise JobError("a parser process ended unexpectedly") from None
