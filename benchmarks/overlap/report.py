"""Records to tables (Markdown) and a plot. All figures are medians over repeats.

Record… ──summarise──> WorkloadSummary (direct, compute, cells) ──> tables, plot
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Values
from benchmarks.harness.plot import log_log, panels
from benchmarks.harness.processor_use import MAX_OTHER_CORES
from benchmarks.harness.report import table
from benchmarks.harness.thread_times import BUDGET, budget, median_budget
from benchmarks.overlap.grid import Cell, Record
from benchmarks.overlap.trial import Trial
from benchmarks.overlap.workload import WORKLOADS, Workload

__all__ = ["CellSummary", "WorkloadSummary", "draw", "summarise", "tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """Medians over the repeats of one cell; per step, seconds and bytes.

    Attributes:
        step_p50_s, step_p90_s: median and 90th percentile of the steps of a run.
        compute_s: compute-only step around the runs.
        ratio: step_p50_s / compute_s of the same run.
        speedup: step p50 of direct mode / step_p50_s.
        exposed_s: wait of the compute lane for rows.
        hit_rate: share of unique rows found in the cache.
        rows_fetched, received_bytes, sent_bytes: per step.
        own_cores, other_cores: cores used by the job, and by other jobs (maximum over repeats).
        processor_ms: processor time of a step by part.
        runs: repeats that count.
    """

    cell: Cell
    runs: int
    step_p50_s: float
    step_p90_s: float
    compute_s: float
    ratio: float
    speedup: float
    exposed_s: float
    hit_rate: float
    rows_fetched: float
    received_bytes: float
    sent_bytes: float
    own_cores: float
    other_cores: float
    processor_ms: Mapping[str, float]

    @property
    def is_quiet(self) -> bool:
        """Whether no other job disturbed the runs that count."""
        return self.other_cores <= MAX_OTHER_CORES

    @property
    def link_bytes_per_s(self) -> float:
        """Both directions."""
        return (self.received_bytes + self.sent_bytes) / self.step_p50_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSummary:
    """Summary of a workload.

    Attributes:
        share: share of a direct step that is not computation.
        rows_unique: per batch.
        losses: number of different losses over the first steps; 1: all runs computed the same bits.
    """

    workload: Workload
    share: float
    compute_s: float
    rows_unique: float
    losses: int
    direct: CellSummary
    cells: tuple[CellSummary, ...]

    @property
    def headline(self) -> tuple[CellSummary, ...]:
        """The cells of the largest cache: a choice that does not depend on the measurements."""
        largest = max(self.workload.cache_shares)
        return tuple(cell for cell in self.cells if cell.cell.cache_share == largest)


def summarise(workload: Workload, records: Sequence[Record]) -> WorkloadSummary:
    """Summary of a workload's records; disturbed runs count only in cells without an undisturbed one."""
    by_cell: dict[Cell, list[Record]] = {}
    for record in records:
        by_cell.setdefault(record.cell, []).append(record)
    by_cell = {cell: [r for r in group if r.is_quiet] or group for cell, group in by_cell.items()}
    direct_s = statistics.median(r.step_p50_s for group in by_cell.values() for r in group if not r.cell.cache_share)
    cells = [_summarise_cell(cell, group, direct_s) for cell, group in by_cell.items()]
    (direct,) = (cell for cell in cells if not cell.cell.cache_share)
    compute_s = statistics.median(record.compute_s for group in by_cell.values() for record in group)
    return WorkloadSummary(
        workload=workload,
        share=1 - compute_s / direct.step_p50_s,
        compute_s=compute_s,
        rows_unique=statistics.median(record.trial.rows_unique for record in records),
        losses=len({record.trial.loss for record in records}),
        direct=direct,
        cells=tuple(cell for cell in cells if cell.cell.cache_share),
    )


def _summarise_cell(cell: Cell, records: Sequence[Record], direct_s: float) -> CellSummary:
    def median(value: Callable[[Record], float]) -> float:
        return statistics.median(value(record) for record in records)

    step_p50_s = median(lambda r: r.step_p50_s)
    return CellSummary(
        cell=cell,
        runs=len(records),
        step_p50_s=step_p50_s,
        step_p90_s=median(lambda r: r.step_p90_s),
        compute_s=median(lambda r: r.compute_s),
        ratio=median(lambda r: r.step_p50_s / r.compute_s),
        speedup=direct_s / step_p50_s,
        exposed_s=median(lambda r: r.trial.exposed_s),
        hit_rate=median(lambda r: r.trial.hit_rate),
        rows_fetched=median(lambda r: r.trial.rows_fetched),
        received_bytes=median(lambda r: r.trial.received_bytes),
        sent_bytes=median(lambda r: r.trial.sent_bytes),
        own_cores=median(lambda r: r.trial.own_cores),
        other_cores=max(r.trial.other_cores for r in records),
        processor_ms=median_budget([record.trial.processor_ms for record in records]),
    )


_HEADERS = ("cache (rows)", "lookahead", "step p50 ms", "p90 ms", "/ compute", "speed-up", "exposed ms", "hit rate")


def tables(values: Values) -> str:
    """A section per workload."""
    return "\n".join(text for summary in _summaries(values) for text in _section(summary))


def _summaries(values: Values) -> list[WorkloadSummary]:
    found = {name: part["found"] for name, part in values["parts"].items() if part.get("found")}
    return [summarise(WORKLOADS[name], [_record(record) for record in records]) for name, records in found.items()]


def _record(value: Mapping[str, Any]) -> Record:
    trial = Trial(**{**value["trial"], "step_s": tuple(value["trial"]["step_s"])})
    return Record(**{**value, "cell": Cell(**value["cell"]), "trial": trial})


def _section(summary: WorkloadSummary) -> Iterator[str]:
    workload = summary.workload
    yield f"### {workload.name}: {workload.model}, batch {workload.batch_size}, dimension {workload.embedding_dim}\n"
    yield (
        f"Compute only {summary.compute_s * 1e3:.1f} ms; direct mode {summary.direct.step_p50_s * 1e3:.1f} ms, "
        f"{summary.share:.1%} of it not computing; {summary.rows_unique:,.0f} unique rows a batch.\n"
    )
    rows = [_row(cell) for cell in (summary.direct, *summary.cells)]
    yield table((*_HEADERS, "rows fetched", "link MB/s", "runs"), rows)
    yield "Milliseconds of processor time a step, by thread of the training process and by process:\n"
    yield table(("cache", "lookahead", *BUDGET), map(_budget, (summary.direct, *summary.cells)))
    yield "".join(f"- {line}\n" for line in _verdicts(summary))


def _row(cell: CellSummary) -> tuple[str, ...]:
    share = cell.cell.cache_share
    return (
        f"{share:.0%} ({cell.cell.cache_rows:,})" if share else "direct",
        _lookahead(cell),
        f"{cell.step_p50_s * 1e3:.1f}",
        f"{cell.step_p90_s * 1e3:.1f}",
        f"{cell.ratio:.2f}",
        f"{cell.speedup:.2f}",
        f"{cell.exposed_s * 1e3:.1f}",
        f"{cell.hit_rate:.1%}",
        f"{cell.rows_fetched:,.0f}",
        f"{cell.link_bytes_per_s / 1e6:.0f}",
        f"{cell.runs}" + ("" if cell.is_quiet else " (disturbed)"),
    )


def _budget(cell: CellSummary) -> tuple[str, ...]:
    share = cell.cell.cache_share
    return (f"{share:.0%}" if share else "direct", _lookahead(cell), *budget(cell.processor_ms))


def _lookahead(cell: CellSummary) -> str:
    return str(cell.cell.lookahead) if cell.cell.cache_share else "-"


def _verdicts(summary: WorkloadSummary) -> Iterator[str]:
    """Targets: the median over the headline's lookaheads, and how many cells of the grid meet them."""
    workload = summary.workload
    targets: list[tuple[str, str, Callable[[CellSummary], float], Callable[[float], bool]]] = [
        (
            "speed-up over direct",
            f">= {workload.target_speedup}",
            lambda cell: cell.speedup,
            lambda speedup: speedup >= workload.target_speedup,
        )
    ]
    wanted = workload.target_ratio
    if wanted is not None:
        targets.append(
            ("step / compute-only", f"<= {wanted:.2f}", lambda cell: cell.ratio, lambda ratio: ratio <= wanted)
        )
    largest = f"{max(workload.cache_shares):.0%}"
    for what, bound, value, is_met in targets:
        yield (
            f"{what}, wanted {bound}: {statistics.median(map(value, summary.headline)):.2f} with a cache of {largest} "
            f"(median over lookaheads); met by {sum(is_met(value(cell)) for cell in summary.cells)} of "
            f"{len(summary.cells)} cells"
        )
    same = "all runs gave the same bits" if summary.losses == 1 else f"{summary.losses} different values"
    yield f"loss of the first steps: {same}"


def draw(values: Values, folder: Path) -> None:
    """Step time over cache size, a curve per lookahead, between compute-only and direct mode."""
    summaries = _summaries(values)
    with panels(folder / "curve.svg", len(summaries), size=(6 * len(summaries), 4)) as axes:
        for axis, summary in zip(axes, summaries, strict=True):
            for lookahead in sorted({cell.cell.lookahead for cell in summary.cells}):
                cells = [cell for cell in summary.cells if cell.cell.lookahead == lookahead]
                curve = sorted((cell.cell.cache_share * 100, cell.step_p50_s * 1e3) for cell in cells)
                axis.plot(*zip(*curve, strict=True), marker="o", label=f"lookahead {lookahead}")
            axis.axhline(summary.compute_s * 1e3, color="black", linestyle="--", label="compute only")
            axis.axhline(summary.direct.step_p50_s * 1e3, color="red", linestyle=":", label="direct mode")
            title = f"{summary.workload.name}: {summary.share:.1%} of a direct step is not computing"
            log_log(axis, title, x="cache, % of all rows", y="step p50, ms")
            axis.legend(fontsize=8)
