"""Pictures of the results: AUC over the examples trained, distance of predicted weights, and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.asynchrony.quality import BATCH_SIZE, SYNCHRONOUS
from benchmarks.asynchrony.records import TITLES, Records, by_key, jobs_of
from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.plot import Axes, panels

__all__ = ["draw"]

#: Width and height of a panel in inches, and most panels in a row.
_WIDTH, _HEIGHT, _COLUMNS = 6.5, 4.5, 2


def draw(values: Values, folder: Path) -> None:
    """Write auc.svg, distance.svg and throughput.svg, each with a panel for every part that was measured."""
    _draw(folder / "auc.svg", [(_auc, (name, found)) for name in TITLES if (found := found_of(values, name))])
    distances: Records = found_of(values, "distance") or []
    optimizers = dict.fromkeys(record["optimizer"] for record in distances)
    _draw(
        folder / "distance.svg",
        [(_distance, (name, [r for r in distances if r["optimizer"] == name])) for name in optimizers],
    )
    measured = {"ranks": "whole jobs", "dense-ranks": "the dense part alone"}
    _draw(
        folder / "throughput.svg",
        [
            *((_simulated, (found,)) for found in [found_of(values, "throughput")] if found),
            *((_speeds, (title, found)) for name, title in measured.items() if (found := found_of(values, name))),
        ],
    )


def _draw(path: Path, drawn: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    """One panel for each function and its arguments behind the axis."""
    if not drawn:
        return
    columns = min(len(drawn), _COLUMNS)
    size = (_WIDTH * columns, _HEIGHT * -(-len(drawn) // columns))
    with panels(path, len(drawn), size=size, columns=columns) as axes:
        for axis, (function, arguments) in zip(axes, drawn, strict=True):
            function(axis, *arguments)


def _auc(axis: Axes, part: str, records: Records) -> None:
    """Mean over the seeds that all have, a curve per schedule of four stages and its fewest micro-batches."""
    found = by_key(records)
    seeds = set.intersection(*(set(runs) for runs in found.values()))
    for key, runs in found.items():
        if key[0] == SYNCHRONOUS or key[1:] in ((4, 1, 0), (4, 3, 0)):
            steps = [score["step"] * BATCH_SIZE for score in next(iter(runs.values()))]
            aucs = [fmean(runs[seed][n]["auc"] for seed in seeds) for n in range(len(steps))]
            style = {"color": "black", "linewidth": 2.5} if key[0] == SYNCHRONOUS else {"marker": "o"}
            axis.plot(steps, aucs, label=key[0], **style)
    _label(
        axis,
        f"{TITLES[part]}, {records[0]['examples']:,} examples; 4 stages, fewest micro-batches",
        x="examples trained",
        y="AUC, mean of the seeds",
        legend="lower right",
    )


def _distance(axis: Axes, optimizer: str, records: Records) -> None:
    """Ratio by stage, a group of bars per schedule."""
    bars = [
        (f"{record['run']['schedule']}\nstage {d['stage']}", d["steps"], d["ratio"])
        for record in records
        for d in record["distances"]
    ]
    axis.bar(range(len(bars)), [ratio for _, _, ratio in bars], color=[f"C{steps - 1}" for _, steps, _ in bars])
    for place, (_, steps, ratio) in enumerate(bars):
        axis.annotate(f"{steps}", (place, ratio), ha="center", va="bottom", fontsize=8)
    axis.axhline(1.0, color="black", linewidth=1, label="the stale weights")
    axis.set_xticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axis.set_ylim(0, 1.8)
    _label(axis, f"{optimizer}; above the bars: steps predicted", y="predicted / stale distance")


def _simulated(axis: Axes, records: Records) -> None:
    """Speed of pipedream in the steady state, against 1f1b."""
    found = {
        f"{r['stages']} stages,\n{r['microbatches']}": (r["synchronous"] / r["free"], r["synchronous"] / r["rows"])
        for r in records
        if r["schedule"] == "pipedream"
    }
    pairs = {
        "free of rows": [free for free, _ in found.values()],
        "rows of the batch before": [r for _, r in found.values()],
    }
    _bars(axis, list(found), pairs)
    _label(axis, "pipedream, simulated; below: stages and micro-batches", y="times 1f1b")


def _speeds(axis: Axes, title: str, rounds: Records) -> None:
    """Speed against 1f1b, medians over the rounds."""
    jobs = jobs_of(rounds)
    found: Mapping[str, list[float]] = {
        name: [median(r[jobs[0]][field] / r[job][field] for r in rounds) for job in jobs]
        for name, field in (("simulated", "simulated_s"), ("measured", "measured_s"))
    }
    _bars(axis, [job.replace("/", ",\nrows_delay ") for job in jobs], found)
    _label(axis, f"two ranks, {title}: simulated and measured", y="times 1f1b", legend="lower right")


def _bars(axis: Axes, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        axis.bar(places, values, width, label=label)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_xticks(range(len(names)), names, fontsize=8)


def _label(axis: Axes, title: str, *, y: str, x: str = "", legend: str = "upper right") -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8, loc=legend)
