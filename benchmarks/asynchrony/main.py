"""What do asynchronous schedules cost in quality, and what could they win in time?

    python -m benchmarks.asynchrony.main [PART …] --data.path FILE

    sample, movielens             AUC over time against 1f1b: Criteo's click logs, synthetic ratings
    synthetic, synthetic-small    the same on synthetic click logs, of as many examples as asked, and of fewer
    late-rows                     AUC with rows that are read a batch late, on Criteo's click logs
    distance                      predicted against actual weights
    throughput, varying           simulated; with times of actions that vary, `dynamic` too
    ranks, dense-ranks            measured on two ranks: whole jobs, and the dense part alone

See README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from bagpipe.errors import InputError
from bagpipe.util.environment import check_environment
from benchmarks.asynchrony.dense_ranks import ROUNDS_AT_A_TIME, rounds_of
from benchmarks.asynchrony.distance import OPTIMIZERS, measure_distances
from benchmarks.asynchrony.pictures import draw
from benchmarks.asynchrony.quality import Run, Score, late_runs_of, measure, runs_of
from benchmarks.asynchrony.ranks import round_of
from benchmarks.asynchrony.report import tables
from benchmarks.asynchrony.throughput import speeds
from benchmarks.asynchrony.varying import varying_times
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.click_logs import add_data_path, data_notes
from benchmarks.harness.machine import TRAINING_PACKAGES

PARTS = (
    "sample", "synthetic", "synthetic-small", "movielens", "late-rows", "distance", "throughput", "varying", "ranks",
    "dense-ranks",
)  # fmt: skip
#: Parts that read Criteo's click logs.
_ON_LOGS = {"sample", "late-rows", "distance"}
#: (stages, micro-batches). With four stages and one micro-batch the gaps are 3, 2, 1, 0; else 1, and 0 on the last.
SETTINGS = ((2, 4), (4, 4), (4, 1))
#: Those of `late-rows`, which needs one micro-batch less than stages.
LATE_SETTINGS = ((2, 4), (4, 4))
#: Examples of `synthetic-small`, in which all settings can be compared.
SMALL_EXAMPLES = 100_000
SPEED_SETTINGS = [(2, 1), (2, 8), (4, 1), (4, 4), (4, 8), (8, 8)]


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    names = options.names or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise InputError(f"expected parts among {', '.join(PARTS)}, got {unknown[0]!r}")
    if _ON_LOGS & set(names) and not Path(options.path).is_file():
        raise InputError(f"--data.path must be a file of Criteo's click logs, got {options.path or 'none'}")
    check_environment()
    made: dict[str, Measure] = {
        "sample": partial(_quality, "sample", options.limit, options),
        "synthetic": partial(_quality, "synthetic", options.examples, options),
        "synthetic-small": partial(_quality, "synthetic", SMALL_EXAMPLES, options),
        "movielens": partial(_quality, "movielens", options.ratings, options),
        "late-rows": partial(_late_rows, options),
        "distance": partial(_distance, options),
        "throughput": _throughput,
        "varying": _varying,
        "ranks": partial(_ranks, options),
        "dense-ranks": partial(_dense_ranks, options),
    }
    return {name: made[name] for name in names}


def _quality(source: str, examples: int, options: argparse.Namespace, part: Part) -> None:
    runs = list(runs_of(SETTINGS[-options.settings :], options.seeds))
    _scored(runs, partial(measure, source=source, path=options.path, examples=examples), options, part, examples)


def _late_rows(options: argparse.Namespace, part: Part) -> None:
    runs = list(late_runs_of(LATE_SETTINGS, options.seeds))
    call = partial(measure, source="sample", path=options.path, examples=options.limit, evaluations=1)
    _scored(runs, call, options, part, options.limit)


def _scored(
    runs: list[Run], call: Callable[[Run], list[Score]], options: argparse.Namespace, part: Part, examples: int
) -> None:
    """Runs in processes of their own, each written when it and those before it are done."""
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        scored = [pool.submit(call, run) for run in runs]
        for run, future in zip(runs, scored, strict=True):
            scores = future.result()
            part.add({"run": asdict(run), "examples": examples, "scores": [asdict(score) for score in scores]})
            late = ", rows late" if run.rows_delay else ""
            part.say(f"{run.schedule} {run.stages} x {run.microbatches}{late} #{run.seed}: AUC {scores[-1].auc:.5f}")


def _distance(options: argparse.Namespace, part: Part) -> None:
    for optimizer in OPTIMIZERS:
        for schedule in ("pipeoptim", "spectrain"):
            run = Run(schedule=schedule, stages=4, microbatches=1, seed=0)
            found = measure_distances(run, optimizer, options.path, options.distance_examples)
            part.add({"run": asdict(run), "optimizer": optimizer, "distances": [asdict(each) for each in found]})
            part.say(f"{optimizer}, {schedule}: {', '.join(f'{each.ratio:.3f}' for each in found)}")


def _throughput(part: Part) -> None:
    part.keep([asdict(speed) for speed in speeds(SPEED_SETTINGS)])


def _varying(part: Part) -> None:
    part.keep([asdict(case) for case in varying_times()])


def _ranks(options: argparse.Namespace, part: Part) -> None:
    for number in range(options.rounds):
        found = round_of(options.rank_examples)
        part.add(found)
        base = found["1f1b/0"]["measured_s"]
        shown = (f"{job} {base / times['measured_s']:.3f}" for job, times in found.items())
        part.say(f"#{number} speed against 1f1b: {', '.join(shown)}")


def _dense_ranks(options: argparse.Namespace, part: Part) -> None:
    for first in range(0, options.dense_rounds, ROUNDS_AT_A_TIME):
        for found in rounds_of(min(options.dense_rounds - first, ROUNDS_AT_A_TIME), options.dense_batches):
            part.add(found)
        shown = (f"{job} {each['measured_s'] * 1e3:.1f} ms" for job, each in found.items() if isinstance(each, dict))
        part.say(", ".join(shown))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="|".join(PARTS), help="default: all")
    add_data_path(parser)
    parser.add_argument("--limit", type=int, default=80_000, help="examples of the click logs")
    parser.add_argument("--examples", type=int, default=2_000_000, help="synthetic examples")
    parser.add_argument("--ratings", type=int, default=200_000, help="ratings of `movielens`")
    parser.add_argument("--distance-examples", type=int, default=40_000, help="examples of a job of `distance`")
    parser.add_argument("--rank-examples", type=int, default=160_000, help="examples of a job of `ranks`")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of `ranks`")
    parser.add_argument("--dense-rounds", type=int, default=10, help="rounds of `dense-ranks`")
    parser.add_argument("--dense-batches", type=int, default=16, help="batches of a job in a round of `dense-ranks`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--settings", type=int, default=len(SETTINGS), help="the last so many of (2, 4), (4, 4), (4, 1)"
    )
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    draw=draw,
    rehearsal={"names": ["synthetic", "throughput"], "examples": 6_000, "seeds": 1, "settings": 1},
    packages=TRAINING_PACKAGES,
    facts=data_notes,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
