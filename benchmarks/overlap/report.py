"""Records to tables (Markdown), one JSON file, and a plot. Medians over repeats everywhere.

Record… ──summarise──> WorkloadSummary (direct, compute, cells) ──> markdown / json / plot
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.overlap.experiment import MAX_OTHER_CORES, Cell, Record
from benchmarks.overlap.trial import Trial
from benchmarks.overlap.workload import Workload

__all__ = ["CellSummary", "Target", "WorkloadSummary", "draw", "markdown", "records_from_json", "summarise", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """Medians over the repeats of one cell; per step, seconds and bytes.

    Attributes:
        step_p50_s, step_p90_s: of the steps of a run.
        compute_s: compute-only step around the runs.
        ratio: step_p50_s / compute_s, of each run by itself.
        speedup: step p50 of direct mode / step_p50_s.
        exposed_s: the compute lane waited for rows.
        hit_rate: share of unique rows found in the cache.
        rows_fetched, received_bytes, sent_bytes: per step.
        own_cores, other_cores: cores used by the job, and by other jobs (the most of any repeat).
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

    @property
    def is_quiet(self) -> bool:
        """No other job used the machine in the runs that count."""
        return self.other_cores <= MAX_OTHER_CORES

    @property
    def link_bytes_per_s(self) -> float:
        """Both directions."""
        return (self.received_bytes + self.sent_bytes) / self.step_p50_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSummary:
    """One workload.

    Attributes:
        share: of a direct step that is not computation.
        rows_unique: per batch.
        losses: different losses seen over the first steps of all runs; one: all runs computed the same bits.
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
        """The cells of the largest cache: chosen before anything is measured, unlike the best of a noisy grid."""
        largest = max(self.workload.cache_shares)
        return tuple(cell for cell in self.cells if cell.cell.cache_share == largest)

    def targets(self) -> Sequence[Target]:
        """What was wanted and what was reached."""
        workload = self.workload
        found = [
            Target(
                what="speed-up over direct",
                wanted=f">= {workload.target_speedup}",
                headline=statistics.median(cell.speedup for cell in self.headline),
                cells_met=sum(cell.speedup >= workload.target_speedup for cell in self.cells),
            )
        ]
        if workload.target_ratio is not None:
            found.append(
                Target(
                    what="step / compute-only",
                    wanted=f"<= {workload.target_ratio:.2f}",
                    headline=statistics.median(cell.ratio for cell in self.headline),
                    cells_met=sum(cell.ratio <= workload.target_ratio for cell in self.cells),
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What was wanted, the median over the headline's lookaheads, and how many cells of the grid meet it."""

    what: str
    wanted: str
    headline: float
    cells_met: int


def summarise(workload: Workload, records: Sequence[Record]) -> WorkloadSummary:
    """Reduce a workload's records."""
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
    )


_HEADER = (
    "| cache (rows) | lookahead | step p50 ms | p90 ms | / compute | speed-up | exposed ms | hit rate | rows fetched "
    "| link MB/s | runs |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def markdown(summary: WorkloadSummary) -> str:
    """The workload's section of the README."""
    workload = summary.workload
    lines = [
        f"### {workload.name}: {workload.model}, batch {workload.batch_size}, dimension {workload.embedding_dim}\n\n",
        f"Compute only {summary.compute_s * 1e3:.1f} ms; direct mode {summary.direct.step_p50_s * 1e3:.1f} ms, "
        f"{summary.share:.1%} of it not computing; {summary.rows_unique:,.0f} unique rows a batch.\n\n",
        _HEADER,
    ]
    for cell in (summary.direct, *summary.cells):
        name = f"{cell.cell.cache_share:.0%} ({cell.cell.cache_rows:,})" if cell.cell.cache_share else "direct"
        values = (
            name,
            str(cell.cell.lookahead) if cell.cell.cache_share else "-",
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
        lines.append("| " + " | ".join(values) + " |\n")
    lines.append("\n")
    largest = f"{max(workload.cache_shares):.0%}"
    for target in summary.targets():
        lines.append(
            f"- {target.what}, wanted {target.wanted}: {target.headline:.2f} with a cache of {largest} "
            f"(median over lookaheads); met by {target.cells_met} of {len(summary.cells)} cells\n"
        )
    same = "all runs gave the same bits" if summary.losses == 1 else f"{summary.losses} different values"
    lines.append(f"- loss of the first steps: {same}\n")
    return "".join(lines)


def to_json(summaries: Sequence[WorkloadSummary], records: Sequence[Record], surroundings: Mapping[str, str]) -> Any:
    """All that was measured, as plain values."""
    return {
        "surroundings": dict(surroundings),
        "workloads": [asdict(summary) for summary in summaries],
        "records": [asdict(record) for record in records],
    }


def records_from_json(value: Any) -> list[Record]:
    """The records of a file written from `to_json`."""
    records = []
    for record in value["records"]:
        trial = Trial(**{**record["trial"], "step_s": tuple(record["trial"]["step_s"])})
        records.append(Record(**{**record, "cell": Cell(**record["cell"]), "trial": trial}))
    return records


def draw(summaries: Sequence[WorkloadSummary], path: Path) -> None:
    """Step time over cache size, a curve per lookahead, between compute-only and direct mode. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "overlap"  # the same figures give the same file
    figure, axes = pyplot.subplots(1, len(summaries), figsize=(6 * len(summaries), 4), squeeze=False)
    for axis, summary in zip(axes[0], summaries, strict=True):
        lookaheads = sorted({cell.cell.lookahead for cell in summary.cells})
        for lookahead in lookaheads:
            curve = sorted(
                (c.cell.cache_share * 100, c.step_p50_s * 1e3) for c in summary.cells if c.cell.lookahead == lookahead
            )
            axis.plot(*zip(*curve, strict=True), marker="o", label=f"lookahead {lookahead}")
        axis.axhline(summary.compute_s * 1e3, color="black", linestyle="--", label="compute only")
        axis.axhline(summary.direct.step_p50_s * 1e3, color="red", linestyle=":", label="direct mode")
        axis.set_title(f"{summary.workload.name}: {summary.share:.1%} of a direct step is not computing", fontsize=10)
        axis.set_xlabel("cache, % of all rows")
        axis.set_ylabel("step p50, ms")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
