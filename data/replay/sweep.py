"""`replay`: replays every setting of a sweep, one after the other.

ScannedLog ──once per oracle setting──────────────> Planner ──CachePlan──> PlanTotals ─┐
    └─row batches, once per baseline and cache size──────────────────────> Counts ─────┴─> ReplayRecord

The first touch of a row is a miss under every policy, so the log's distinct rows are the misses that need no read. This
is exact; the oracle's own mark (`OwnerPlan.fetch_new`) can take a new row of an unbounded table for an old one. Every
row that enters a cache is written, at eviction or at the end. Memory: window, caches and distinct rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.planner import make_planner, plans_of
from bagpipe.util.machine import machine_facts
from bagpipe.util.temporary_folder import temporary_folder
from data.formats import open_source
from data.replay.baselines import BASELINES, run_baseline
from data.replay.log_tables import LogTables, at_setting
from data.replay.options import Sweep, policy_problem
from data.replay.plan_counts import PlanTotals
from data.replay.records import Replay, ReplayRecord, Setting
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from data.replay.scanned_log import ScannedLog, Watch, scan

__all__ = ["replay", "settings_of"]

#: Default windows.
DEFAULT_LOOKAHEADS = (2, 8, 16, 32, 64, 128, 256)
#: Default caches of all ranks together, as shares of the distinct rows.
DEFAULT_CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """Costs of a setting; names as in `ReplayRecord`. `misses` is int64 by table."""

    rows_unique: int
    misses: NDArray[np.int64]
    peak_rows: int
    evictions_waiting: int | None = None
    batches_waiting: int | None = None
    exchange_rows: int | None = None
    exchange_rows_now: int | None = None
    exchange_bytes_now: int | None = None
    seconds: float


def replay(sweep: Sweep, watch: Watch) -> Replay:
    """Replay every combination; failed ones have their error in their record.

    Raises:
        InputError: the log is unreadable or empty.
        JobError: no disk space for the row batches of the first batch size; later failures are in the records.
    """
    first = sweep.configs[0]
    source = open_source(first.data, first.run.seed)
    tables = LogTables.of(source.schema, first)
    counter = RowCounter(tables.spec(first))
    has_baselines = any(policy in BASELINES for policy in sweep.policies)
    records: list[ReplayRecord] = []
    logs: list[ScannedLog] = []
    for config in sweep.configs:
        with (
            temporary_folder("replay") as folder,
            _keeping(folder),
            RowBatchFile(folder) as row_batches,
        ):
            try:
                with _keeping(folder):
                    log = scan(
                        config, source, tables, counter, row_batches if has_baselines else None, watch, counts=not logs
                    )
                if logs:
                    logs[0].check_same(log.examples, log.ids)
            except (InputError, JobError) as error:
                if not logs:
                    raise
                unread = dataclasses.replace(logs[0], config=config)
                records.extend(_record(setting, unread, None, error) for setting in settings_of(unread, sweep))
            else:
                logs.append(log)
                records.extend(_replay_log(log, sweep, Path(folder), watch))
    return Replay(
        link=sweep.link,
        path=first.data.path,
        format=first.data.format,
        examples=logs[0].examples,
        batches=logs[0].batches,
        ids=logs[0].ids,
        rows=logs[0].num_rows,
        largest={log.batch_size: log.largest for log in logs},
        machine=machine_facts(),
        records=tuple(dataclasses.replace(record, link_s=sweep.link.seconds(record)) for record in records),
        skew=counter.skew(tuple(table.name for table in tables.rows.tables)),
    )


@contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    """Raise JobError if the row batches do not fit on disk. Readers raise InputError, never OSError."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot keep the rows of the log in {folder}: {error.strerror or error}; set TMPDIR to another folder"
        ) from error


def settings_of(log: ScannedLog, sweep: Sweep) -> tuple[Setting, ...]:
    """The combinations of one batch size, in the order of the command line."""
    lookaheads = sweep.lookaheads or _default_lookaheads(log.batches)
    cache_rows = sweep.cache_rows or _default_cache_rows(log.num_rows, log.largest, sweep.world_size)
    return tuple(
        Setting(
            policy=policy,
            lookahead=lookahead,
            cache_rows=rows,
            batch_size=log.batch_size,
            world_size=sweep.world_size,
        )
        for policy, lookahead, rows in product(sweep.policies, lookaheads, cache_rows)
    )


def _default_lookaheads(batches: int) -> tuple[int, ...]:
    return tuple(lookahead for lookahead in DEFAULT_LOOKAHEADS if lookahead <= batches) or (batches,)


def _default_cache_rows(num_rows: int, largest: int, world_size: int) -> tuple[int, ...]:
    """Shares of the distinct rows; the smallest size that holds a batch, if none of them does."""
    sizes = dict.fromkeys(-(-int(num_rows * share) // world_size) for share in DEFAULT_CACHE_SHARES)
    least = max(1, -(-largest // world_size))
    return tuple(size for size in sizes if size >= least) or (least,)


def _replay_log(log: ScannedLog, sweep: Sweep, folder: Path, watch: Watch) -> Iterator[ReplayRecord]:
    """The records of one batch size. A baseline does not look ahead, so it runs once for all windows."""
    settings = settings_of(log, sweep)
    known: dict[tuple[str, int], _Found] = {}
    for number, setting in enumerate(settings, start=1):
        key = (setting.policy, setting.cache_rows)
        label = f"{number}/{len(settings)} {setting.policy} {setting.lookahead} {setting.cache_rows}"
        try:
            _check(setting, log)
            if setting.policy not in BASELINES:
                found = _run_oracle(setting, log, watch, label)
            else:
                found = known[key] = known.get(key) or _run_baseline(setting, log, folder)
        except (InputError, JobError) as error:
            yield _record(setting, log, None, error)
        else:
            yield _record(setting, log, found)


def _check(setting: Setting, log: ScannedLog) -> None:
    """Refuse settings that the first pass has shown to be impossible.

    Raises:
        InputError: unknown policy; or a window longer than the log (baselines have none).
        CapacityError: the largest batch does not fit.
    """
    problem = policy_problem(setting.policy)
    if problem is not None:
        raise InputError(problem)
    if setting.lookahead > log.batches and setting.policy not in BASELINES:
        raise InputError(
            f"--lookahead {setting.lookahead} is longer than the log: {log.batches} batches of {log.batch_size}"
        )
    num_slots = setting.cache_rows * setting.world_size
    if log.largest > num_slots:
        ranks = setting.world_size
        each = f" on each of {ranks} ranks, {num_slots} in all" if ranks > 1 else ""
        raise CapacityError(
            f"batch {log.largest_at} needs {log.largest} unique rows but --cache_rows is {setting.cache_rows}{each}: "
            f"raise it to at least {-(-log.largest // ranks)}, or lower data.batch_size ({log.batch_size})"
        )


def _run_oracle(setting: Setting, log: ScannedLog, watch: Watch, label: str) -> _Found:
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
    with closing(log.read(watch, label)) as batches:
        for plan in plans_of(planner, batches):
            totals.add(plan)
    return _Found(
        rows_unique=totals.rows_unique,
        misses=totals.misses,
        peak_rows=totals.peak_rows,
        evictions_waiting=totals.evictions_waiting,
        batches_waiting=totals.batches_waiting,
        exchange_rows=totals.exchange_rows,
        exchange_rows_now=totals.exchange_rows_now,
        exchange_bytes_now=totals.exchange_bytes_now,
        seconds=time.perf_counter() - start_s,
    )


def _run_baseline(setting: Setting, log: ScannedLog, folder: Path) -> _Found:
    """One pass of a baseline over the row batches. Baselines have no owners, so they count no exchange."""
    assert log.row_batches is not None, "a sweep with a baseline keeps the row batches"
    start_s = time.perf_counter()
    with _keeping(folder):
        counts = run_baseline(
            setting.policy,
            log.row_batches,
            num_rows=log.num_rows,
            # As for the oracle: the queue of resident rows is compacted at a few times the length of the cache.
            num_slots=min(setting.cache_rows * setting.world_size, max(1, log.num_rows)),
            folder=folder,
            world_size=setting.world_size,
            group_of_row=log.table_of_row,
        )
    misses = np.zeros_like(log.first_touches)  # tables without rows at the end have no group
    misses[: len(counts.misses_by_group)] = counts.misses_by_group
    return _Found(
        rows_unique=counts.rows_unique,
        misses=misses,
        peak_rows=counts.peak_rows,
        seconds=time.perf_counter() - start_s,
    )


def _record(setting: Setting, log: ScannedLog, found: _Found | None, error: Exception | None = None) -> ReplayRecord:
    named = dataclasses.asdict(setting)
    if found is None:
        return ReplayRecord(**named, error=" ".join(str(error).split()))
    misses, row_bytes = int(found.misses.sum()), log.tables.row_bytes
    return ReplayRecord(
        **named,
        batches=log.batches,
        ids=log.ids,
        rows_unique=found.rows_unique,
        rows_first_touch=log.num_rows,
        rows_fetched=misses - log.num_rows,
        rows_written=misses,
        evictions_waiting=found.evictions_waiting,
        batches_waiting=found.batches_waiting,
        hit_rate=1.0 - misses / found.rows_unique if found.rows_unique else 0.0,
        peak_rows=found.peak_rows,
        row_bytes=_common(row_bytes),
        bytes_fetched=int((found.misses - log.first_touches) @ row_bytes),
        bytes_written=int(found.misses @ row_bytes),
        exchange_rows=found.exchange_rows,
        exchange_rows_now=found.exchange_rows_now,
        exchange_bytes_now=found.exchange_bytes_now,
        seconds=found.seconds,
        ids_per_s=log.ids / found.seconds,
    )


def _common(row_bytes: NDArray[np.int64]) -> int | None:
    """Bytes of a row if all tables have equal rows, else None."""
    return int(row_bytes[0]) if row_bytes.shape[0] and (row_bytes == row_bytes[0]).all() else None
