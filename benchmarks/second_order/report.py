"""Tables of the results: NE along training, and those of `step_tables`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, TypeAlias

from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.report import table
from benchmarks.second_order.contestants import ADAGRAD, CONTESTANTS, flag_of
from benchmarks.second_order.pipeline_tables import bubble_tables, share_tables, simulated_tables
from benchmarks.second_order.quality import BATCH_SIZE, DATA, Run, chosen
from benchmarks.second_order.step_tables import cost_tables, step_tables

__all__ = ["Reached", "reached", "tables"]

Record: TypeAlias = Mapping[str, Any]
#: Of Adagrad's steps, for targets along its run.
_SHARES = (0.25, 0.5, 0.75)
#: Examples, wall and processor seconds of training.
Reached: TypeAlias = tuple[float, float, float]


def tables(values: Values) -> str:
    """All parts that were measured."""
    parts = [
        *(_quality(name, found) for name in DATA for found in [found_of(values, name)] if found),
        *(step_tables(found) for found in [found_of(values, "steps")] if found),
        *(cost_tables(found) for found in [found_of(values, "costs")] if found),
        *(bubble_tables(found) for found in [found_of(values, "bubbles")] if found),
        *(share_tables(found) for found in [found_of(values, "shares")] if found),
        *(simulated_tables(found) for found in [found_of(values, "simulated")] if found),
    ]
    return "\n".join(parts)


def reached(scores: Sequence[Mapping[str, float]], target: float) -> Reached | None:
    """The first evaluation whose NE is at most the target; None: there is none."""
    for score in scores:
        if score["ne"] <= target:
            return score["step"] * BATCH_SIZE, score["wall_s"], score["processor_s"]
    return None


def _quality(name: str, records: Sequence[Record]) -> str:
    tried = [record for record in records if record["run"]["is_try"]]
    title = f"### {DATA[name].title}, {records[0]['examples']:,} examples"
    held_out = f"the last {DATA[name].held_out:.1%} held out"
    seeds = len({record["run"]["seed"] for record in tried})
    text = f"{title}: settings that were tried, at most {DATA[name].tried_examples:,} examples, seeds: {seeds}\n\n"
    text += _tries(tried)
    for ranks in (1, 2):
        own = [record for record in records if not record["run"]["is_try"] and record["run"]["ranks"] == ranks]
        if own:
            where = "one rank" if ranks == 1 else "two ranks"
            text += f"\n{title}, {held_out}, {where}\n\n{_runs(own)}"
    return text


def _tries(records: Sequence[Record]) -> str:
    ended = [(Run(**record["run"]), record) for record in records if "error" not in record]
    settings, rows = chosen(ended), []
    for name, contestant in CONTESTANTS.items():
        nes = {
            flag_of(each): fmean(own)
            for each in contestant.tries
            for own in [[_end(record) for run, record in ended if (run.name, run.settings) == (name, each)]]
            if own
        }
        best = flag_of(settings[name])
        failed = sum("error" in record for record in records if record["run"]["name"] == name)
        cells = (f"{ne:.4f}" for ne in (nes[best], median(nes.values()), max(nes.values())))
        rows.append((name, len(contestant.tries), best, *cells, failed))
    headers = ("optimizer", "settings", "best settings", "their NE", "median NE", "worst NE", "jobs not finite")
    return table(headers, rows)


def _by_name(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Name of the optimizer, and form of K-FAC on several ranks -> seed -> job that ended well."""
    found: dict[str, dict[int, Record]] = {}
    for record in (each for each in records if "error" not in each):
        run = record["run"]
        is_kfac, on_ranks = run["name"].startswith("kfac"), run["ranks"] > 1
        name = f"{run['name']}, {run['factors']}" if is_kfac and on_ranks else run["name"]
        found.setdefault(name, {})[run["seed"]] = record
    return found


def _runs(records: Sequence[Record]) -> str:
    by_name = _by_name(records)
    base, ends, targets, courses = by_name[ADAGRAD], [], [], []
    for name, of_seed in by_name.items():
        seeds = [seed for seed in of_seed if seed in base]
        cells: list[str | None] = []
        reaches: list[str] = []
        for ne in (_end, _least):
            own = [ne(of_seed[seed]) for seed in seeds]
            gains = [each - ne(base[seed]) for each, seed in zip(own, seeds, strict=True)]
            cells += [f"{fmean(own):.4f}", None if name == ADAGRAD else _difference(gains)]
            *cost, few = _to_target({seed: (of_seed[seed], base[seed], ne(base[seed])) for seed in seeds})
            reaches += [cost[0] + few, *cost[1:]]
        per_step = f"{fmean(_per_step_ms(of_seed[seed]) for seed in seeds):.1f}"
        ends.append((name, len(seeds), *cells, per_step))
        targets.append((name, *reaches))
        course = [
            _to_target({seed: (of_seed[seed], base[seed], _at(base[seed], share)) for seed in seeds})
            for share in _SHARES
        ]
        courses.append((name, *(f"{each[1]}, {each[3]}{each[4]}" if each[1] else each[0] for each in course)))
    headers = (
        "optimizer", "runs", "NE at the end", "minus Adagrad's", "least NE", "minus Adagrad's", "processor ms a step",
    )  # fmt: skip
    reached_headers = (
        "optimizer", "examples to Adagrad's NE at the end", "times Adagrad's", "processor s", "times Adagrad's",
        "examples to Adagrad's least NE", "times Adagrad's", "processor s", "times Adagrad's",
    )  # fmt: skip
    course_headers = ("to Adagrad's NE after", *(f"{share:.0%}" for share in _SHARES))
    return (
        f"{table(headers, ends)}\n{table(reached_headers, targets)}\n"
        f"Times Adagrad's examples and processor seconds:\n\n{table(course_headers, courses)}"
    )


def _to_target(by_seed: Mapping[int, tuple[Record, Record, float]]) -> tuple[str, ...]:
    """Examples and processor seconds to the target with their ratios to Adagrad's: means over the seeds that reach it.

    The last cell says how many do, if not all.

    Args:
        by_seed: a job, Adagrad's, and the target.
    """
    pairs = [
        (own, other)
        for job, base, target in by_seed.values()
        for own, other in [(reached(job["scores"], target), reached(base["scores"], target))]
        if own is not None and other is not None
    ]
    if not pairs:
        return ("not reached",) + ("",) * 4
    own, base = ([fmean(each[n] for each in found) for n in (0, 2)] for found in zip(*pairs, strict=True))
    few = "" if len(pairs) == len(by_seed) else f" ({len(pairs)} of {len(by_seed)} runs)"
    ratios = [f"{each / other:.2f}" for each, other in zip(own, base, strict=True)]
    return f"{own[0]:,.0f}", ratios[0], f"{own[1]:.1f}", ratios[1], few


def _end(record: Record) -> float:
    return float(record["scores"][-1]["ne"])


def _at(record: Record, share: float) -> float:
    """NE at the first evaluation after a share of the steps."""
    scores = record["scores"]
    return float(next(score["ne"] for score in scores if score["step"] >= share * scores[-1]["step"]))


def _least(record: Record) -> float:
    return min(float(score["ne"]) for score in record["scores"])


def _per_step_ms(record: Record) -> float:
    last = record["scores"][-1]
    return float(last["processor_s"] / last["step"] * 1e3)


def _difference(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):+.4f}{error}"
