"""`python -m data replay`: prints a table, writes JSON and a report.

argv ─> Sweep ─> replay ─> records ─> recommend ─> out.json, out.html ─> trials (--train) ─> both again, table

All settings that can be replayed are written, whatever else fails; then one line names the first failure, with exit
code 2, or 1 for a training run. An interrupted replay leaves no files.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from bagpipe.errors import EXIT_INTERRUPTED, InputError, JobError
from bagpipe.types.batch import Batch
from bagpipe.util.outputs import write_json, write_whole
from bagpipe.util.packages import needed_by
from bagpipe.util.printing import printable
from data.replay.baselines import BASELINES
from data.replay.options import NO_POLICY, Sweep, parse_sweep
from data.replay.passes import Found
from data.replay.recommendation import recommend
from data.replay.records import LimitSavings, Replay, ReplayRecord, ThresholdSavings, Trial
from data.replay.sweep import replay
from data.replay.trials import run_trial, trial_settings, with_trials

__all__ = ["main"]

COLUMNS = (
    "policy", "batch", "window", "cache", "fetched", "written", "link ms", "waiting", "hit rate", "peak rows", "now MB",
    "M ids/s",
)  # fmt: skip
THRESHOLD_COLUMNS = ("min_uses", "batch", "rows", "rows saved", "MB", "bytes saved", "uses before")
LIMIT_COLUMNS = ("expire_after", "batch", "rows at end", "rows at most", "deleted", "born anew", "MB at most")
TRIAL_COLUMNS = ("trained", "window", "cache", "steps", "step ms", "samples/s", "exposed s", "fetched", "AUC")


def main(argv: Sequence[str], out: TextIO | None = None) -> None:
    """Run the command.

    Raises:
        InputError: unusable flags or log; or, after all output is written, a setting that could not be replayed.
        JobError: an output that cannot be written; or, after all output is written, a training run that failed.
    """
    sweep = parse_sweep(argv)
    write_report = _report_writer() if sweep.report_path else None
    with _unwinding():
        found = replay(sweep, _watch, _watch_passes)
        best = recommend(found.records)
        if best is not None:
            found = dataclasses.replace(found, recommended=best.setting, reason=best.reason)
        try:
            _write(found, sweep, write_report)
            if best is not None and sweep.train:
                trials = tuple(_trials(found, sweep))
                found = dataclasses.replace(found, trials=trials, records=with_trials(found.records, trials))
                _write(found, sweep, write_report)
        finally:  # a full disk or an interrupted training must not lose the table
            (out or sys.stdout).write(printable("\n".join(_lines(found))) + "\n")
    failed = [record.error for record in found.records if record.error is not None]
    if failed:
        raise InputError(f"{len(failed)} of {len(found.records)} settings could not be replayed: {failed[0]}")
    failed = [trial.error for trial in found.trials if trial.error is not None]
    if failed:
        raise JobError(f"{len(failed)} of {len(found.trials)} training runs failed: {failed[0]}")


def _report_writer() -> Callable[[Path, Replay], None]:
    """The function that writes the report; raises InputError before the replay if plotly is missing."""
    with needed_by("--report", "plotly"):
        from data.replay.report import write_report
    return write_report


def _write(found: Replay, sweep: Sweep, write_report: Callable[[Path, Replay], None] | None) -> None:
    if sweep.json_path:
        write_json(sweep.json_path, _json(found, sweep))
    if sweep.csv_path:
        write_whole(sweep.csv_path, _csv(found.records))
    if write_report is not None:
        write_report(Path(sweep.report_path), found)


def _json(found: Replay, sweep: Sweep) -> list[dict[str, Any]]:
    """The records, each with the savings of its batch size, if thresholds or limits were tried.

    Without policies: one record of each batch size, with the counts of the log alone.
    """
    records = found.records or tuple(
        ReplayRecord(
            policy=NO_POLICY,
            lookahead=0,
            cache_rows=0,
            batch_size=batch_size,
            world_size=sweep.world_size,
            ids=found.ids,
            rows_first_touch=found.rows,
        )
        for batch_size in found.savings
    )
    savings = {batch_size: dataclasses.asdict(saved) for batch_size, saved in found.savings.items()}
    return [dataclasses.asdict(record) | savings.get(record.batch_size, {}) for record in records]


def _csv(records: Sequence[ReplayRecord]) -> bytes:
    """The records as CSV in UTF-8: a line of field names, then one line each; None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(ReplayRecord))
    writer.writerows(dataclasses.astuple(record) for record in records)
    return text.getvalue().encode("utf-8", "backslashreplace")


@contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that its files and training runs end too."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_INTERRUPTED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]:
    shown: Iterable[Batch] = tqdm(batches, desc=label, total=total, unit=" batches", leave=False, disable=None)
    return shown


def _watch_passes(outcomes: Iterable[Found | Exception], total: int) -> Iterable[Found | Exception]:
    shown: Iterable[Found | Exception] = tqdm(
        outcomes, desc="replaying", total=total, unit=" settings", leave=False, disable=None
    )
    return shown


def _trials(found: Replay, sweep: Sweep) -> Iterable[Trial]:
    assert found.recommended is not None, "trials need a recommended setting"
    settings = trial_settings(found.recommended, found.records)
    for setting in tqdm(settings, desc="training", unit=" runs", leave=False, disable=None):
        yield run_trial(setting, sweep)


def _lines(found: Replay) -> list[str]:
    """The lines printed on the terminal."""
    lines = [
        f"{found.path or found.format}: {found.examples:,} examples, {found.ids:,} ids, {found.rows:,} distinct rows",
        *_least_caches(found),
        *(_sweep_lines(found) if found.records else ()),
        *_savings_lines(found),
    ]
    if found.recommended is not None:
        lines += ["", f"recommended: {found.reason}"]
    if found.trials:
        lines += ["", *_table(TRIAL_COLUMNS, (_trial_cells(trial) for trial in found.trials if trial.error is None))]
        lines += _failures(trial.error for trial in found.trials)
    return lines


def _sweep_lines(found: Replay) -> list[str]:
    return [
        "",
        *_table(COLUMNS, (_cells(record) for record in found.records if record.error is None)),
        f"link ms: for the rows of a batch, at {found.link.bytes_per_s / 1e9:.4g} GB/s (--bandwidth)",
        "waiting: batches whose insert waits for the update of the batch before, because rows of it leave at once",
        *_failures(record.error for record in found.records),
    ]


def _savings_lines(found: Replay) -> list[str]:
    """The thresholds and the limits, each with its batch size."""
    thresholds = [(size, each) for size, saved in found.savings.items() for each in saved.thresholds]
    limits = [(size, each) for size, saved in found.savings.items() for each in saved.limits]
    lines = []
    if thresholds:
        lines += ["", *_table(THRESHOLD_COLUMNS, (_threshold_cells(size, each) for size, each in thresholds))]
        lines.append(
            "rows: with at least min_uses uses; uses before: those that read the default row (data.default_row)"
        )
    if limits:
        first = limits[0][1]
        lines += ["", *_table(LIMIT_COLUMNS, (_limit_cells(size, each) for size, each in limits))]
        lines.append(
            f"expire_after: in {first.unit}; rows expire before batches 0, {first.every:,}, … (data.expire_every)"
        )
    return lines


def _threshold_cells(batch_size: int, threshold: ThresholdSavings) -> tuple[str, ...]:
    total = threshold.total
    return (
        str(threshold.min_uses),
        str(batch_size),
        f"{total.rows:,}",
        f"{total.rows_saved:.1%}",
        f"{total.bytes / 1e6:,.1f}",
        f"{total.bytes_saved:.1%}",
        f"{total.default_share:.1%}",
    )


def _limit_cells(batch_size: int, limit: LimitSavings) -> tuple[str, ...]:
    total = limit.total
    return (
        f"{limit.expire_after:,g}",
        str(batch_size),
        f"{total.rows_at_end:,}",
        f"{total.rows_at_most:,}",
        f"{total.rows_deleted:,}",
        f"{total.rows_born_anew:,}",
        f"{total.bytes_at_most / 1e6:,.1f}",
    )


def _least_caches(found: Replay) -> Iterator[str]:
    """The smallest cache that every batch fits, by batch size."""
    if not found.records:
        return
    ranks = found.records[0].world_size
    for batch_size, largest in found.largest.items():
        least = -(-largest // ranks)
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        yield f"largest batch of {batch_size} examples: {largest:,} unique rows, so cache.rows at least {least}{each}"


def _cells(record: ReplayRecord) -> tuple[str, ...]:
    """Cells of a successful setting. A baseline does not look ahead, so its window is "any"."""
    now = record.exchange_bytes_now
    return (
        record.policy,
        str(record.batch_size),
        "any" if record.policy in BASELINES else str(record.lookahead),
        f"{record.cache_rows:,}",
        f"{record.rows_fetched:,}",
        f"{record.rows_written:,}",
        "" if record.link_s is None else f"{record.link_s * 1e3 / (record.batches or 1):,.3g}",
        "" if record.batches_waiting is None else f"{record.batches_waiting / (record.batches or 1):.0%}",
        f"{record.hit_rate:.4f}",
        f"{record.peak_rows:,}",
        "" if now is None else f"{now / 1e6:,.1f}",
        "" if record.ids_per_s is None else f"{record.ids_per_s / 1e6:.1f}",
    )


def _trial_cells(trial: Trial) -> tuple[str, ...]:
    """Cells of a successful trial."""
    return (
        trial.policy if trial.cache_rows else "direct mode",
        str(trial.lookahead),
        f"{trial.cache_rows:,}",
        f"{trial.steps:,}",
        "" if trial.step_s_p50 is None else f"{trial.step_s_p50 * 1e3:.2f}",
        f"{trial.samples_per_s:,.0f}",
        f"{trial.exposed_embedding_s:.2f}",
        f"{trial.rows_fetched:,}",
        "" if trial.auc is None else f"{trial.auc:.5f}",
    )


def _failures(errors: Iterable[str | None]) -> list[str]:
    """Each distinct error, with its count."""
    return [f"failed ({count}): {error}" for error, count in Counter(errors).items() if error is not None]


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, the first to the left; each distinct line once."""
    lines = [names, *dict.fromkeys(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in lines]
