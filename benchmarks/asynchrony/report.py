"""Tables and curves of the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.asynchrony.quality import BATCH_SIZE, SYNCHRONOUS
from benchmarks.asynchrony.throughput import WORK
from benchmarks.asynchrony.varying import DRAWS, MICROBATCHES, STAGES
from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.plot import panels
from benchmarks.harness.report import table

__all__ = ["draw", "tables"]

Records = Sequence[Mapping[str, Any]]
#: Schedule, stages, micro-batches.
Key = tuple[str, int, int]
TITLES = {"sample": "Criteo Terabyte sample", "synthetic": "synthetic Criteo Kaggle"}


def tables(values: Values) -> str:
    """All parts that were measured."""
    parts = [
        *(_quality(TITLES[name], found_of(values, name)) for name in TITLES if found_of(values, name)),
        *(_distance(found) for found in [found_of(values, "distance")] if found),
        *(_throughput(found) for found in [found_of(values, "throughput")] if found),
        *(_varying(found) for found in [found_of(values, "varying")] if found),
        *(_ranks(found) for found in [found_of(values, "ranks")] if found),
    ]
    return "\n".join(parts)


def draw(values: Values, folder: Path) -> None:
    """Mean AUC over the examples trained, a curve per schedule of four stages and its fewest micro-batches."""
    found = {name: found_of(values, name) for name in TITLES if found_of(values, name)}
    if not found:
        return
    with panels(folder / "auc.svg", len(found), size=(7 * len(found), 4.5)) as axes:
        for axis, (name, records) in zip(axes, found.items(), strict=True):
            for key, runs in _by_key(records).items():
                if key[0] == SYNCHRONOUS or key[1:] in ((4, 1), (4, 3)):
                    steps = [score["step"] * BATCH_SIZE for score in next(iter(runs.values()))]
                    aucs = [fmean(run[n]["auc"] for run in runs.values()) for n in range(len(steps))]
                    style = {"color": "black", "linewidth": 2.5} if key[0] == SYNCHRONOUS else {"marker": "o"}
                    axis.plot(steps, aucs, label=key[0], **style)
            axis.set_title(f"{TITLES[name]}: 4 stages, fewest micro-batches", fontsize=10)
            axis.set_xlabel("examples trained")
            axis.set_ylabel("AUC, mean of the seeds")
            axis.grid(visible=True, alpha=0.3)
            axis.legend(fontsize=8)


def _by_key(records: Records) -> dict[Key, dict[int, list[Mapping[str, float]]]]:
    """Key -> seed -> scores."""
    found: dict[Key, dict[int, list[Mapping[str, float]]]] = {}
    for record in records:
        run = record["run"]
        key = (run["schedule"], run["stages"], run["microbatches"])
        found.setdefault(key, {})[run["seed"]] = record["scores"]
    return found


def _quality(title: str, records: Records) -> str:
    runs = _by_key(records)
    base = next(of_seed for key, of_seed in runs.items() if key[0] == SYNCHRONOUS)
    examples = records[0]["examples"]
    headers = (
        "stages", "micro-batches", "schedule", "runs", "AUC after a fifth, and two", "AUC at the end",
        "minus 1f1b's, and its standard error", "log loss minus 1f1b's",
    )  # fmt: skip
    rows = []
    for (schedule, stages, microbatches), of_seed in sorted(runs.items(), key=_order):
        seeds = [seed for seed in of_seed if seed in base]
        last = [of_seed[seed][-1] for seed in seeds]
        gains = [score["auc"] - base[seed][-1]["auc"] for seed, score in zip(seeds, last, strict=True)]
        losses = [score["log_loss"] - base[seed][-1]["log_loss"] for seed, score in zip(seeds, last, strict=True)]
        is_base = schedule == SYNCHRONOUS
        early = [fmean(of_seed[seed][n]["auc"] for seed in seeds) for n in (0, 1)]
        rows.append(
            (
                "any" if is_base else stages,
                "any" if is_base else microbatches,
                schedule,
                len(seeds),
                f"{early[0]:.4f}, {early[1]:.4f}",
                _spread([score["auc"] for score in last]),
                None if is_base else _difference(gains),
                None if is_base else _difference(losses),
            )
        )
    return f"### {title}, {examples:,} examples, the last fifth held out; Adam\n\n" + table(headers, rows)


def _order(item: tuple[Key, object]) -> tuple[bool, int, int]:
    (schedule, stages, microbatches), _ = item
    return schedule != SYNCHRONOUS, stages, -microbatches


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _difference(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):+.4f}{error}"


def _distance(records: Records) -> str:
    headers = (
        "optimizer",
        "schedule",
        "stage",
        "steps predicted",
        "stale, relative to the weights",
        "predicted / stale",
    )
    rows = [
        (r["optimizer"], r["run"]["schedule"], d["stage"], d["steps"], f"{d['stale']:.2e}", f"{d['ratio']:.3f}")
        for r in records
        for d in r["distances"]
    ]
    return "### Distance to the actual weights; Criteo sample, 4 stages, 1 micro-batch\n\n" + table(headers, rows)


def _throughput(records: Records) -> str:
    headers = (
        "stages", "micro-batches", "schedules", "free of rows: utilisation", "times 1f1b",
        "rows of the batch before: times 1f1b",
    )  # fmt: skip
    rows = [
        (
            stages,
            microbatches,
            names,
            f"{WORK * microbatches / free:.0%}",
            f"{synchronous / free:.2f}",
            f"{synchronous / rows_time:.2f}",
        )
        for stages, microbatches, names, free, rows_time, synchronous in _grouped(records)
    ]
    return "### Simulated steady state: B = 2 F, all else free\n\n" + table(headers, rows)


def _varying(cases: Records) -> str:
    synchronous, limits = cases[0]["synchronous"], cases[0]["dynamic"]
    headers = ("times", *(f"`{name}`" for name in synchronous), *(f"`dynamic`, {n} in flight" for n in limits))
    rows = [
        (case["case"], *(f"{time:.1f}" for time in (*case["synchronous"].values(), *case["dynamic"].values())))
        for case in cases
    ]
    title = (
        f"### Times that vary: {STAGES} ranks, {MICROBATCHES} micro-batches, F = 1 and B = 2 on average, {DRAWS} draws"
    )
    return title + "\n\n" + table(headers, rows)


def _ranks(rounds: Records) -> str:
    headers = (
        "schedule", "rows_delay", "step ms", "simulated ms", "measured / simulated", "times 1f1b", "simulated",
    )  # fmt: skip
    rows = []
    for job in rounds[0]:
        schedule, rows_delay = job.split("/")
        own = [found[job] for found in rounds]
        bases = [found[f"{SYNCHRONOUS}/0"] for found in rounds]
        pairs = list(zip(bases, own, strict=True))
        rows.append(
            (
                schedule,
                rows_delay,
                f"{median(each['measured_s'] for each in own) * 1e3:.1f}",
                f"{median(each['simulated_s'] for each in own) * 1e3:.1f}",
                f"{median(each['measured_s'] / each['simulated_s'] for each in own):.3f}",
                f"{median(base['measured_s'] / each['measured_s'] for base, each in pairs):.3f}",
                f"{median(base['simulated_s'] / each['simulated_s'] for base, each in pairs):.3f}",
            )
        )
    title = f"### Two ranks, two stages, 8 micro-batches: medians of {len(rounds)} rounds\n\n"
    return title + table(headers, rows)


def _grouped(records: Records) -> Iterator[tuple[int, int, str, float, float, float]]:
    groups: dict[tuple[int, int, float, float, float], list[str]] = {}
    for r in records:
        key = (r["stages"], r["microbatches"], round(r["free"], 6), r["rows"], r["synchronous"])
        groups.setdefault(key, []).append(r["schedule"])
    for (stages, microbatches, free, rows, synchronous), names in groups.items():
        is_all = len(names) == max(len(group) for group in groups.values())
        yield stages, microbatches, "all six" if is_all else ", ".join(names), free, rows, synchronous
