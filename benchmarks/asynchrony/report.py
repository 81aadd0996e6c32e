"""Tables of the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, stdev

from benchmarks.asynchrony.quality import SYNCHRONOUS
from benchmarks.asynchrony.records import TITLES, Key, Records, by_key, jobs_of
from benchmarks.asynchrony.throughput import WORK
from benchmarks.asynchrony.varying import DRAWS, MICROBATCHES, STAGES
from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.report import table, verdict

__all__ = ["tables"]

#: A step on two ranks takes at most so many times what is simulated; its speed is at most so much less than simulated.
TARGET_STEP, TARGET_SPEED = 1.15, 0.05


def tables(values: Values) -> str:
    """All parts that were measured."""
    parts = [
        *(_quality(TITLES[name], found_of(values, name)) for name in TITLES if found_of(values, name)),
        *(_late_rows(found) for found in [found_of(values, "late-rows")] if found),
        *(_distance(found) for found in [found_of(values, "distance")] if found),
        *(_throughput(found) for found in [found_of(values, "throughput")] if found),
        *(_varying(found) for found in [found_of(values, "varying")] if found),
        *(_ranks(found) for found in [found_of(values, "ranks")] if found),
        *(_dense_ranks(found) for found in [found_of(values, "dense-ranks")] if found),
    ]
    return "\n".join(parts)


def _quality(title: str, records: Records) -> str:
    runs = by_key(records)
    base = next(of_seed for key, of_seed in runs.items() if key[0] == SYNCHRONOUS)
    examples = records[0]["examples"]
    headers = (
        "stages", "micro-batches", "schedule", "runs", "AUC after a fifth, and two", "AUC at the end",
        "minus 1f1b's, and its standard error", "log loss minus 1f1b's",
    )  # fmt: skip
    rows = []
    for (schedule, stages, microbatches, _), of_seed in sorted(runs.items(), key=_order):
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


def _late_rows(records: Records) -> str:
    runs = by_key(records)
    base = next(of_seed for key, of_seed in runs.items() if key[0] == SYNCHRONOUS)
    headers = (
        "stages", "schedule", "runs", "AUC, rows_delay 0", "AUC, rows_delay 1", "1 minus 0, and its standard error",
        "0 minus 1f1b's", "1 minus 1f1b's", "log loss, 1 minus 0",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = [
        ("any", SYNCHRONOUS, len(base), _spread([of[-1]["auc"] for of in base.values()]), *(None,) * 5)
    ]
    for (schedule, stages, microbatches, late), of_seed in runs.items():
        if not late:
            continue
        others = runs[schedule, stages, microbatches, 0]
        seeds = [seed for seed in of_seed if seed in base and seed in others]
        aucs = [
            [scores[seed][-1]["auc"] for seed in seeds] for scores in (base, others, of_seed)
        ]  # of 1f1b, with rows_delay 0 and 1
        losses = [of_seed[seed][-1]["log_loss"] - others[seed][-1]["log_loss"] for seed in seeds]
        gains = [
            [late - early for early, late in zip(aucs[first], aucs[second], strict=True)]
            for first, second in ((1, 2), (0, 1), (0, 2))
        ]
        spreads = (_spread(aucs[1]), _spread(aucs[2]))
        rows.append((stages, schedule, len(seeds), *spreads, *map(_difference, gains), _difference(losses)))
    examples = records[0]["examples"]
    title = (
        f"### Rows a batch late; {TITLES['sample']}, {examples:,} examples, 4 micro-batches, AUC at the end; Adam\n\n"
    )
    return title + table(headers, rows)


def _order(item: tuple[Key, object]) -> tuple[bool, int, int]:
    (schedule, stages, microbatches, _), _ = item
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


def _dense_ranks(rounds: Records) -> str:
    headers = (
        "schedule", "rows_delay", "batch ms", "simulated ms", "measured / simulated", "times 1f1b", "simulated",
        "forecast ms", "times 1f1b, forecast", "cores of others",
    )  # fmt: skip
    rows, steps, speeds = [], [], []
    jobs = jobs_of(rounds)
    for job in jobs:
        schedule, rows_delay = job.split("/")
        own, bases = [found[job] for found in rounds], [found[jobs[0]] for found in rounds]
        pairs = list(zip(bases, own, strict=True))
        ratio = median(each["measured_s"] / each["simulated_s"] for each in own)
        speed, expected, foretold = (
            median(base[field] / each[field] for base, each in pairs)
            for field in ("measured_s", "simulated_s", "forecast_s")
        )
        if job != jobs[0]:
            steps.append(ratio)
            speeds.append(expected - speed)
        rows.append(
            (
                schedule,
                rows_delay,
                f"{median(each['measured_s'] for each in own) * 1e3:.1f}",
                f"{median(each['simulated_s'] for each in own) * 1e3:.1f}",
                f"{ratio:.3f}",
                f"{speed:.3f}",
                f"{expected:.3f}",
                f"{median(each['forecast_s'] for each in own) * 1e3:.1f}",
                f"{foretold:.3f}",
                f"{median(each['others'] for each in own):.2f}",
            )
        )
    worst, least = max(steps), max(speeds)
    title = f"### The dense part alone on two ranks, 8 micro-batches: medians of {len(rounds)} rounds\n\n"
    return (
        title
        + table(headers, rows)
        + (
            f"\nBatch, at most {TARGET_STEP} times simulated: {verdict(worst, at_most=TARGET_STEP)}, at worst "
            f"{worst:.3f}. Times 1f1b, at least simulated minus {TARGET_SPEED}: "
            f"{verdict(least, at_most=TARGET_SPEED)}, at worst minus {least:.3f}.\n"
        )
    )


def _grouped(records: Records) -> Iterator[tuple[int, int, str, float, float, float]]:
    groups: dict[tuple[int, int, float, float, float], list[str]] = {}
    for r in records:
        key = (r["stages"], r["microbatches"], round(r["free"], 6), r["rows"], r["synchronous"])
        groups.setdefault(key, []).append(r["schedule"])
    for (stages, microbatches, free, rows, synchronous), names in groups.items():
        is_all = len(names) == max(len(group) for group in groups.values())
        yield stages, microbatches, "all six" if is_all else ", ".join(names), free, rows, synchronous
