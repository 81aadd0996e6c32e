"""`run_pass`: one pass of a setting over a scanned log, in this process or in one of a pool.

Setting ─ an oracle's policy ──ScannedLog.read──> Planner ──CachePlan──> PlanTotals ─┐
        └─ a baseline ────────RowBatchFile──────────────────────────────> Counts ────┴─> Found

A pass depends on the log and its setting alone, so passes can run at the same time, and find the same. Within a pass a
cache is a state that every batch changes: the batches of one pass are never shared out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import JobError
from bagpipe.files.access import pin, pins
from bagpipe.files.version import FileVersion
from bagpipe.oracle.planner import make_planner, plans_of
from bagpipe.types.batch import Batch
from bagpipe.util.process_pool import check_interrupt
from data.replay.baselines import BASELINES, run_baseline
from data.replay.log_tables import at_setting
from data.replay.next_use_file import LOG_POLICY, NextUseFile, told
from data.replay.plan_counts import PlanTotals
from data.replay.records import Setting
from data.replay.row_batch_file import RowBatches, RowBatchFile
from data.replay.scanned_log import EXPIRED, ScannedLog, Watch

__all__ = ["ROW_BATCH_POLICIES", "Found", "SharedLog", "keeping", "run_pass"]

#: Policies whose passes read the row batches.
ROW_BATCH_POLICIES = frozenset({LOG_POLICY, *BASELINES})

_TABLES = "tables.npy"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Costs of a setting; names as in `ReplayRecord`. `misses` and `dropped` are int64 by table."""

    rows_unique: int
    misses: NDArray[np.int64]
    dropped: NDArray[np.int64]
    peak_rows: int
    evictions_waiting: int | None = None
    batches_waiting: int | None = None
    exchange_rows: int | None = None
    exchange_rows_now: int | None = None
    exchange_bytes_now: int | None = None
    seconds: float


@contextmanager
def keeping(folder: Path) -> Iterator[None]:
    """Raise JobError if the row batches do not fit on disk. Readers raise InputError, never OSError."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot keep the rows of the log in {folder}: {error.strerror or error}; set TMPDIR to another folder"
        ) from error


def run_pass(setting: Setting, log: ScannedLog, folder: Path, watch: Watch, label: str) -> Found:
    """Replay one setting.

    Args:
        setting: possible for the log.
        log: the log.
        folder: for temporary files of a baseline, and of next uses.
        watch: shows the progress of an oracle's pass under `label`.

    Raises:
        CapacityError: a batch does not fit.
        InputError: the log is unreadable or has changed.
        JobError: no disk space for temporary files.
    """
    if setting.policy in BASELINES:
        return _run_baseline(setting, log, folder)
    return _run_oracle(setting, log, folder, watch, label)


def _run_oracle(setting: Setting, log: ScannedLog, folder: Path, watch: Watch, label: str) -> Found:
    """One pass through the oracle."""
    start_s = time.perf_counter()
    config = at_setting(
        log.config,
        policy=setting.policy,
        lookahead=setting.lookahead,
        # More slots than rows change nothing, and the oracle's arrays are as long as the cache.
        cache_rows=max(1, min(setting.cache_rows, log.num_rows)),
    )
    planner = make_planner(log.tables.spec(config, setting.world_size))
    totals = PlanTotals(log.tables.weight_bytes, log.tables.gradient_bytes)
    with ExitStack() as stack:
        batches = stack.enter_context(closing(log.read(watch, label)))
        if setting.policy == LOG_POLICY:
            assert log.row_batches is not None, "a sweep with this policy keeps the row batches"
            stack.enter_context(keeping(folder))
            next_uses = stack.enter_context(NextUseFile(log.row_batches, log.num_rows, folder))
            batches = stack.enter_context(closing(told(batches, next_uses, planner.spec)))
        for plan in plans_of(planner, batches):
            totals.add(plan)
    return Found(
        rows_unique=totals.rows_unique,
        misses=totals.misses,
        dropped=totals.dropped,
        peak_rows=totals.peak_rows,
        evictions_waiting=totals.evictions_waiting,
        batches_waiting=totals.batches_waiting,
        exchange_rows=totals.exchange_rows,
        exchange_rows_now=totals.exchange_rows_now,
        exchange_bytes_now=totals.exchange_bytes_now,
        seconds=time.perf_counter() - start_s,
    )


def _run_baseline(setting: Setting, log: ScannedLog, folder: Path) -> Found:
    """One pass of a baseline over the row batches. Baselines have no owners, so they count no exchange."""
    assert log.row_batches is not None, "a sweep with a baseline keeps the row batches"
    start_s = time.perf_counter()
    with keeping(folder):
        counts = run_baseline(
            setting.policy,
            log.row_batches,
            num_rows=log.num_rows,
            # As for the oracle: the queue of resident rows is compacted at a few times the length of the cache.
            num_slots=min(setting.cache_rows * setting.world_size, max(1, log.num_rows)),
            folder=folder,
            world_size=setting.world_size,
            group_of_row=log.table_of_row,
            expired=log.expired,
        )
    misses, dropped = np.zeros((2, *log.first_touches.shape), np.int64)  # tables without rows at the end have no group
    misses[: len(counts.misses_by_group)] = counts.misses_by_group
    dropped[: len(counts.dropped_by_group)] = counts.dropped_by_group
    return Found(
        rows_unique=counts.rows_unique,
        misses=misses,
        dropped=dropped,
        peak_rows=counts.peak_rows,
        seconds=time.perf_counter() - start_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedLog:
    """A scanned log that other processes can take: what is long stays in the files of `folder`.

    Attributes:
        log: without its long parts.
        folder: of the files.
        versions: those of remote files that have been scanned.
    """

    log: ScannedLog
    folder: Path
    versions: Mapping[str, FileVersion]

    @classmethod
    def of(cls, log: ScannedLog, folder: Path) -> SharedLog:
        """Write what the passes read. `folder` is that of the row batches.

        Raises:
            JobError: no disk space.
        """
        if log.row_batches is not None:
            with keeping(folder):
                log.row_batches.flush()
                if log.expired is not None:
                    log.expired.flush()
                np.save(folder / _TABLES, log.table_of_row)
        short = dataclasses.replace(log, table_of_row=np.empty(0, np.int16), row_batches=None, expired=None)
        return cls(log=short, folder=folder, versions=pins(log.source.files))

    def run(self, setting: Setting, number: int) -> Found:
        """`run_pass` in a process of a pool. `number` is another for each pass at the same time."""
        pin(self.versions)
        if setting.policy not in ROW_BATCH_POLICIES:
            return run_pass(setting, self.log, self.folder, _interruptible, "")
        own = self.folder / f"pass-{number}"
        with keeping(self.folder):
            own.mkdir()
        with ExitStack() as stack:
            row_batches = stack.enter_context(RowBatchFile(self.folder, reads=True))
            expired: RowBatches | None = None
            if self.log.rows_expire:
                expired = stack.enter_context(RowBatchFile(self.folder, EXPIRED, reads=True))
            log = dataclasses.replace(
                self.log,
                row_batches=_Interruptible(row_batches),
                expired=expired,
                table_of_row=np.load(self.folder / _TABLES, mmap_mode="r"),
            )
            return run_pass(setting, log, own, _interruptible, "")


def _interruptible(batches: Iterable[Batch], label: str, total: int | None) -> Iterator[Batch]:
    """The batches, until the pool ends."""
    for batch in batches:
        check_interrupt()
        yield batch


class _Interruptible:
    """Row batches, until the pool ends."""

    def __init__(self, row_batches: RowBatches) -> None:
        self._row_batches = row_batches

    def __len__(self) -> int:
        return len(self._row_batches)

    def __getitem__(self, number: int, /) -> NDArray[np.int32]:
        check_interrupt()
        return self._row_batches[number]

    def flush(self) -> None:
        """Nothing is written."""
