"""Outcomes to tables (Markdown), one JSON file, and a plot.

Outcome… ──summarise──> Summary per setting and contender ──> tables / speed.svg;  Outcome… ──> results.json

Tables go into README.md between its marks; into tables.md in a folder that has none.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import MAX_OTHER_CORES
from benchmarks.peers.setting import SETTINGS
from benchmarks.peers.task import CONTENDERS, Outcome
from benchmarks.readme import fill_in

__all__ = ["Summary", "draw", "markdown", "outcomes_from_json", "summarise", "to_json", "write"]

#: What was wanted of "ours cached" in the setting "criteo".
TARGET_RATIO, TARGET_SETTING, OURS = 1.10, "criteo", "ours cached"
#: Faster than torchrec, whose kernel it is.
BARE = "fbgemm tables"
#: Held-out AUC of two runs that differ in rounding only: 8,000 examples, 250 of them clicked.
SAME_AUC = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A contender in a setting, over its runs.

    Attributes:
        runs, disturbed: runs; those beside other jobs.
        samples_per_s: batch size over the median over runs of the mean step.
        p50_s, p99_s: medians over runs of a run's p50; p99 of the steps of all runs.
        ratio, ratio_low, ratio_high: p50 over the faster torchrec-all-local's of the same repeat: median, least, most.
        bytes_per_step: on the network.
        peak_bytes: resident memory of its processes, the store's server left out.
        rows_peak_bytes: rows and their optimizer state in it.
        auc: of the held-out examples, median.
        loss: of the first steps, median.
        hit_rate: of the cache.
        own_cores: used.
    """

    setting: str
    contender: str
    runs: int
    disturbed: int
    samples_per_s: float
    p50_s: float
    p99_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    bytes_per_step: float
    peak_bytes: float
    rows_peak_bytes: int
    auc: float
    loss: float
    hit_rate: float | None
    own_cores: float


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """In the order of settings and contenders."""
    found = []
    for setting in dict.fromkeys(outcome.setting for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.setting == setting]
        floors: dict[int, float] = {}
        for outcome in own:
            if CONTENDERS[outcome.contender].is_floor:
                p50_s = statistics.median(outcome.step_s)
                floors[outcome.repeat] = min(p50_s, floors.get(outcome.repeat, p50_s))
        for contender in CONTENDERS:
            runs = [outcome for outcome in own if outcome.contender == contender]
            if runs:
                found.append(_summarise(runs, floors))
    return found


def _summarise(runs: Sequence[Outcome], floors: Mapping[int, float]) -> Summary:
    p50s = {run.repeat: statistics.median(run.step_s) for run in runs}
    ratios = [p50_s / floors[repeat] for repeat, p50_s in p50s.items() if repeat in floors] or [float("nan")]
    steps = [step_s for run in runs for step_s in run.step_s]
    mean_s = statistics.median(statistics.mean(run.step_s) for run in runs)
    return Summary(
        setting=runs[0].setting,
        contender=runs[0].contender,
        runs=len(runs),
        disturbed=sum(run.other_cores > MAX_OTHER_CORES for run in runs),
        samples_per_s=SETTINGS[runs[0].setting].batch_size / mean_s,
        p50_s=statistics.median(p50s.values()),
        p99_s=statistics.quantiles(steps, n=100)[-1],
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        bytes_per_step=statistics.median(run.bytes_per_step for run in runs),
        peak_bytes=statistics.median(run.peak_bytes + run.helpers_peak_bytes for run in runs),
        rows_peak_bytes=runs[0].rows_peak_bytes,
        auc=statistics.median(run.auc if run.auc is not None else float("nan") for run in runs),
        loss=statistics.median(run.loss for run in runs),
        hit_rate=runs[0].hit_rate,
        own_cores=statistics.median(run.own_cores for run in runs),
    )


_HEADER = (
    "| contender | samples/s | step p50 ms | p99 ms | / torchrec local (range) | network MB/step "
    "| peak memory MB (rows) | AUC | cores | runs |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def markdown(summaries: Sequence[Summary]) -> str:
    """Tables of the README, a section for each setting."""
    lines = []
    for name in dict.fromkeys(summary.setting for summary in summaries):
        setting = SETTINGS[name]
        lines.append(
            f"### {name}: {setting.what}\n\nDLRM, dimension {setting.embedding_dim}, bottom "
            f"{'-'.join(map(str, setting.bottom_mlp))}, top {'-'.join(map(str, setting.top_mlp))}, batch "
            f"{setting.batch_size}, {setting.threads} compute thread{'s' * (setting.threads > 1)}; caches of "
            f"{setting.cache_share:.0%} of the rows, lookahead {setting.lookahead}.\n\n{_HEADER}"
        )
        lines += [_row(summary) for summary in summaries if summary.setting == name]
        lines.append("\n")
    lines += _verdicts(summaries)
    return "".join(lines)


def _row(summary: Summary) -> str:
    hits = "" if summary.hit_rate is None else f", hits {summary.hit_rate:.0%}"
    values = (
        f"{summary.contender}{hits}",
        f"{summary.samples_per_s:,.0f}",
        f"{summary.p50_s * 1e3:.1f}",
        f"{summary.p99_s * 1e3:.1f}",
        f"{summary.ratio:.2f} ({summary.ratio_low:.2f} to {summary.ratio_high:.2f})",
        f"{summary.bytes_per_step / 1e6:.2f}",
        f"{summary.peak_bytes / 1e6:,.0f} ({summary.rows_peak_bytes / 1e6:.1f})",
        f"{summary.auc:.4f}",
        f"{summary.own_cores:.2f}",
        f"{summary.runs}" + (f" ({summary.disturbed} disturbed)" if summary.disturbed else ""),
    )
    return "| " + " | ".join(values) + " |\n"


def _verdicts(summaries: Sequence[Summary]) -> list[str]:
    lines = []
    for name in dict.fromkeys(summary.setting for summary in summaries):
        own = [summary for summary in summaries if summary.setting == name]
        losses, aucs = ([getattr(summary, key) for summary in own] for key in ("loss", "auc"))
        spread = max(aucs) - min(aucs)
        same = "equal" if spread <= SAME_AUC else "NOT equal"
        lines.append(
            f"- {name}: AUC within {spread:.4f} ({same}), mean loss of the first steps within "
            f"{(max(losses) - min(losses)) / min(losses):.1e} of each other\n"
        )
        for ours in own:
            if ours.contender == OURS:
                wanted = f", wanted at most {TARGET_RATIO:.2f}" if name == TARGET_SETTING else ""
                bare = [ours.p50_s / summary.p50_s for summary in own if summary.contender == BARE]
                beside = f"; / {BARE}: {bare[0]:.2f}" if bare else ""
                lines.append(
                    f"- {name}: {OURS} / the faster torchrec with all rows local: {ours.ratio:.2f}{wanted}{beside}\n"
                )
    return lines


def to_json(outcomes: Sequence[Outcome], surroundings: Mapping[str, str]) -> dict[str, Any]:
    """All that was measured, as plain values."""
    return {
        "surroundings": dict(surroundings),
        "summaries": [asdict(summary) for summary in summarise(outcomes)],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def outcomes_from_json(value: Mapping[str, Any]) -> list[Outcome]:
    """The outcomes of a file written from `to_json`."""
    return [Outcome(**{**outcome, "step_s": tuple(outcome["step_s"])}) for outcome in value["outcomes"]]


def write(folder: Path, outcomes: Sequence[Outcome], surroundings: Mapping[str, str]) -> str:
    """results.json, the tables and speed.svg; returns the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(to_json(outcomes, surroundings)) + "\n")
    summaries = summarise(outcomes)
    tables = markdown(summaries)
    readme = folder / "README.md"
    if readme.exists():
        fill_in(readme, tables)
    else:
        (folder / "tables.md").write_text(tables)
    try:
        draw(summaries, folder / "speed.svg")
    except ModuleNotFoundError as error:
        print(f"no plot: {error}", file=sys.stderr)
    return tables


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Samples per second, a bar for each contender, a panel for each setting."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same figures give the same file
    names = list(dict.fromkeys(summary.setting for summary in summaries))
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names) + 1, 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        own = [summary for summary in summaries if summary.setting == name][::-1]
        colours = [_colour(summary.contender) for summary in own]
        bars = axis.barh([s.contender for s in own], [s.samples_per_s for s in own], color=colours)
        axis.bar_label(bars, [f"{s.samples_per_s:,.0f}" for s in own], fontsize=7, padding=2)
        axis.margins(x=0.18)
        axis.set_title(f"{name}: samples per second", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.grid(visible=True, axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _colour(contender: str) -> str:
    if contender.startswith("ours"):
        return "tab:orange"
    return "tab:blue" if CONTENDERS[contender].is_floor or contender == BARE else "tab:gray"
