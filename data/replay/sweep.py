"""`replay`: replays every setting of a sweep, one after the other or in several processes.

ScannedLog ──once per oracle setting──────────────> Planner ──CachePlan──> PlanTotals ─┐
    └─row batches, once per baseline and cache size──────────────────────> Counts ─────┴─> ReplayRecord

The first touch of a row, also of one that begins anew after it expired, is a miss under every policy, so the rows that
begin are the misses that need no read. This is exact; the oracle's own mark (`OwnerPlan.fetch_new`) can take a new row
of an unbounded table for an old one. Every row that enters a cache is written, at eviction or at the end, unless it
expires there. Memory: window, caches and distinct rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.util.machine import machine_facts
from bagpipe.util.process_pool import ProcessPool
from bagpipe.util.temporary_folder import temporary_folder
from data.formats import open_source
from data.replay.baselines import BASELINES
from data.replay.log_tables import LogTables
from data.replay.options import Sweep, policy_problem
from data.replay.passes import ROW_BATCH_POLICIES, Found, SharedLog, keeping, run_pass
from data.replay.records import Replay, ReplayRecord, Savings, Setting
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from data.replay.savings import SavingsCounter
from data.replay.scanned_log import EXPIRED, ScannedLog, Watch, scan
from data.row_stage import admission_rules, admitted_schema

__all__ = ["replay", "settings_of"]

#: Shows the progress over passes: takes what they find, in order, and their number.
WatchPasses = Callable[[Iterable[Found | Exception], int], Iterable[Found | Exception]]

#: Default windows.
DEFAULT_LOOKAHEADS = (2, 8, 16, 32, 64, 128, 256)
#: Default caches of all ranks together, as shares of the distinct rows.
DEFAULT_CACHE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)


def _unwatched(outcomes: Iterable[Found | Exception], total: int) -> Iterable[Found | Exception]:
    return outcomes


def replay(sweep: Sweep, watch: Watch, watch_passes: WatchPasses = _unwatched) -> Replay:
    """Replay every combination; failed ones have their error in their record.

    Args:
        sweep: the options.
        watch: shows the progress of a pass of this process.
        watch_passes: shows the progress over the passes of other processes.

    Raises:
        InputError: the log is unreadable or empty, or a stream.
        JobError: no disk space for the row batches of the first batch size; later failures are in the records.
    """
    first = sweep.configs[0]
    if first.data.is_stream:
        raise InputError(f"replay reads a whole log, several times: {first.data.path} is read as a stream")
    tried = sweep.tried
    wants_times = tried is not None and bool(tried.limits) and tried.unit == "days"
    source = open_source(first.data, first.run.seed, wants_times=wants_times)
    tables = LogTables.of(admitted_schema(first.data, source.schema), first)
    counter = RowCounter(tables.spec(first))
    # What is admitted before a row's last use depends on the batches, so each size has its own ids and rows.
    are_own = admission_rules(first.data, source.schema) is not None
    has_row_batches = any(policy in ROW_BATCH_POLICIES for policy in sweep.policies)
    records: list[ReplayRecord] = []
    logs: list[ScannedLog] = []
    savings: dict[int, Savings] = {}
    with ProcessPool(sweep.jobs) as pool:
        pool.start()
        passes = _Passes(pool=pool, jobs=sweep.jobs, watch=watch, watch_passes=watch_passes)
        for config in sweep.configs:
            with (
                temporary_folder("replay") as folder,
                keeping(folder),
                RowBatchFile(folder) as row_batches,
                RowBatchFile(folder, EXPIRED) as expired,
            ):
                kept = row_batches if has_row_batches else None
                gone = expired if has_row_batches and config.data.expires else None
                saved = None if tried is None else SavingsCounter(source.schema, tables.row_bytes_by_name, tried)
                try:
                    with keeping(folder):
                        counts = not logs or are_own
                        own = RowCounter(tables.spec(first)) if logs and are_own else counter
                        log = scan(config, source, tables, own, kept, watch, counts=counts, expired=gone, savings=saved)
                    if logs:
                        logs[0].check_same(log.examples, logs[0].ids if are_own else log.ids)
                except (InputError, JobError) as error:
                    if not logs:
                        raise
                    unread = dataclasses.replace(logs[0], config=config)
                    records.extend(_record(setting, unread, None, error) for setting in settings_of(unread, sweep))
                else:
                    logs.append(log)
                    if saved is not None:
                        savings[log.batch_size] = saved.found()
                    records.extend(_replay_log(log, sweep, Path(folder), passes))
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
        savings=savings,
    )


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


def _replay_log(log: ScannedLog, sweep: Sweep, folder: Path, runner: _Passes) -> Iterator[ReplayRecord]:
    """The records of one batch size. A baseline does not look ahead, so it runs once for all windows."""
    settings = settings_of(log, sweep)
    found: dict[Setting, Found | Exception] = {}
    passes: dict[tuple[object, ...], Setting] = {}
    for setting in settings:
        try:
            _check(setting, log)
        except (InputError, JobError) as error:
            found[setting] = error
        else:
            passes.setdefault(_pass_of(setting), setting)
    found_by_pass = dict(zip(passes, runner.outcomes(tuple(passes.values()), log, folder), strict=True))
    for setting in settings:
        outcome = found.get(setting) or found_by_pass[_pass_of(setting)]
        if isinstance(outcome, Exception):
            yield _record(setting, log, None, outcome)
        else:
            yield _record(setting, log, outcome)


def _pass_of(setting: Setting) -> tuple[object, ...]:
    """The same for settings that one pass serves."""
    window = 0 if setting.policy in BASELINES else setting.lookahead
    return setting.policy, window, setting.cache_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Runs passes, in a pool if it has several processes, and shows the progress."""

    pool: ProcessPool
    jobs: int
    watch: Watch
    watch_passes: WatchPasses

    def outcomes(self, passes: tuple[Setting, ...], log: ScannedLog, folder: Path) -> Iterator[Found | Exception]:
        """What the passes find, in order; their errors, if they fail."""
        if self.jobs == 1:
            for number, setting in enumerate(passes, start=1):
                label = f"{number}/{len(passes)} {setting.policy} {setting.lookahead} {setting.cache_rows}"
                yield _outcome(partial(run_pass, setting, log, folder, self.watch, label))
            return
        shared = SharedLog.of(log, folder)
        works = [partial(shared.run, setting, number) for number, setting in enumerate(passes)]
        yield from self.watch_passes(self.pool.map(_outcome, works), len(passes))


def _outcome(run: Callable[[], Found]) -> Found | Exception:
    try:
        return run()
    except (InputError, JobError) as error:
        return error


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


def _record(setting: Setting, log: ScannedLog, found: Found | None, error: Exception | None = None) -> ReplayRecord:
    named = dataclasses.asdict(setting)
    if found is None:
        return ReplayRecord(**named, error=" ".join(str(error).split()))
    misses, births, row_bytes = int(found.misses.sum()), int(log.births.sum()), log.tables.row_bytes
    return ReplayRecord(
        **named,
        batches=log.batches,
        ids=log.ids,
        rows_unique=found.rows_unique,
        rows_first_touch=births,
        rows_fetched=misses - births,
        rows_written=misses - int(found.dropped.sum()),
        rows_deleted=log.rows_deleted,
        evictions_waiting=found.evictions_waiting,
        batches_waiting=found.batches_waiting,
        hit_rate=1.0 - misses / found.rows_unique if found.rows_unique else 0.0,
        peak_rows=found.peak_rows,
        row_bytes=_common(row_bytes),
        bytes_fetched=int((found.misses - log.births) @ row_bytes),
        bytes_written=int((found.misses - found.dropped) @ row_bytes),
        exchange_rows=found.exchange_rows,
        exchange_rows_now=found.exchange_rows_now,
        exchange_bytes_now=found.exchange_bytes_now,
        seconds=found.seconds,
        ids_per_s=log.ids / found.seconds,
    )


def _common(row_bytes: NDArray[np.int64]) -> int | None:
    """Bytes of a row if all tables have equal rows, else None."""
    return int(row_bytes[0]) if row_bytes.shape[0] and (row_bytes == row_bytes[0]).all() else None
