"""When do second-order steps pay? Examples and seconds to a validation NE, time of a step, bytes of K-FAC.

    python -m benchmarks.second_order.main [PART …] --data.path FILE

    sample, synthetic, movielens    NE over the examples: Criteo's click logs, synthetic ones, synthetic ratings
    steps                           time of a step on one and two ranks, and bytes really sent and kept
    costs                           bytes and operations by formula
    bubbles                         K-FAC in a pipeline of two ranks: in the bubbles, and behind the backwards
    shares, simulated               partial backwards over shares: jobs, and schedules in the simulator

See README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from bagpipe.errors import InputError, JobError
from bagpipe.util.environment import check_environment
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.click_logs import add_data_path, data_notes
from benchmarks.harness.machine import TRAINING_PACKAGES
from benchmarks.harness.rounds import turns
from benchmarks.second_order.bubbles import BUBBLE_JOBS, measure_bubbles
from benchmarks.second_order.costs import cost_records
from benchmarks.second_order.job import Outcome
from benchmarks.second_order.quality import DATA, Run, chosen, measure_run, rank_runs, runs, tries
from benchmarks.second_order.report import tables
from benchmarks.second_order.shares import SETTINGS, measure_shares, share_jobs, simulated_shares
from benchmarks.second_order.steps import MODELS, measure_steps, step_jobs

PARTS = (*DATA, "steps", "costs", "bubbles", "shares", "simulated")


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    names = options.names or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise InputError(f"expected parts among {', '.join(PARTS)}, got {unknown[0]!r}")
    if "sample" in names and not Path(options.path).is_file():
        raise InputError(f"--data.path must be a file of Criteo's click logs, got {options.path or 'none'}")
    check_environment()
    examples = {"sample": options.limit, "synthetic": options.examples, "movielens": options.ratings}
    made: dict[str, Measure] = {
        **{name: partial(_quality, name, count, options) for name, count in examples.items()},
        "steps": partial(_steps, options),
        "costs": _costs,
        "bubbles": partial(_bubbles, options),
        "shares": partial(_shares, options),
        "simulated": _simulated,
    }
    return {name: made[name] for name in names}


def _quality(name: str, examples: int, options: argparse.Namespace, part: Part) -> None:
    call = partial(measure_run, part=name, path=options.path, examples=examples)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:

        def measured(asked: Iterable[Run]) -> list[tuple[Run, Outcome]]:
            """The jobs, each written when it and those before it are done."""
            submitted = [(run, pool.submit(call, run)) for run in asked]
            found = []
            for run, future in submitted:
                try:
                    outcome = future.result()
                except JobError as error:  # a loss that is not finite
                    part.say(f"{run.name} {run.settings} #{run.seed}: {error}")
                    part.add({"run": asdict(run), "examples": examples, "error": str(error)})
                    continue
                part.add({"run": asdict(run), "examples": examples, **outcome})
                shown = f"{run.name} {run.settings} #{run.seed}, {run.ranks} ranks, {run.factors}"
                part.say(f"{shown}: NE {outcome['scores'][-1]['ne']:.5f}")
                found.append((run, outcome))
            return found

        settings = chosen(measured(tries(DATA[name])))
        measured([*runs(settings, options.seeds), *rank_runs(settings, options.rank_seeds)])


def _steps(options: argparse.Namespace, part: Part) -> None:
    jobs = {str(number): job for number, job in enumerate(step_jobs(options.models))}
    for number, name in turns(list(jobs), max(options.rounds, options.large_rounds)):
        job = jobs[name]
        if number >= (options.large_rounds if job.model == "large" else options.rounds):
            continue
        outcome = measure_steps(job, options.batch_size)
        part.add({"round": number, "job": asdict(job), "batch_size": options.batch_size, **outcome})
        part.say(f"#{number} {job}: {outcome['processor_s'] * 1e3:.1f} ms of processor a step")


def _costs(part: Part) -> None:
    part.keep(cost_records())


def _bubbles(options: argparse.Namespace, part: Part) -> None:
    jobs = {job.name: job for job in BUBBLE_JOBS}
    for number, name in turns(list(jobs), options.rounds):
        found = measure_bubbles(jobs[name], options.bubble_examples)
        part.add({"round": number, "name": name, "schedule": jobs[name].schedule, **found})
        part.say(f"#{number} {name}: {found['measured_s'] * 1e3:.1f} ms, simulated {found['simulated_s'] * 1e3:.1f} ms")


def _shares(options: argparse.Namespace, part: Part) -> None:
    jobs = {f"{job.setting} {job.shares}": job for job in share_jobs(options.settings)}
    for source, examples in (("sample", options.limit), ("synthetic", options.share_examples)):
        if source == "sample" and not options.path:
            continue
        for seed, name in turns(list(jobs), options.share_seeds):
            outcome = measure_shares(jobs[name], source=source, path=options.path, examples=examples, seed=seed)
            part.add({"source": source, "examples": examples, "seed": seed, "job": asdict(jobs[name]), **outcome})
            part.say(f"{source} #{seed} {name}: AUC {outcome['scores'][-1]['auc']:.4f}")


def _simulated(part: Part) -> None:
    part.keep({"times": simulated_shares()})


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="|".join(PARTS), help="default: all")
    add_data_path(parser)
    parser.add_argument("--limit", type=int, default=80_000, help="examples of the click logs")
    parser.add_argument("--examples", type=int, default=2_000_000, help="synthetic examples")
    parser.add_argument("--ratings", type=int, default=200_000, help="ratings of `movielens`")
    parser.add_argument("--seeds", type=int, default=3, help="of runs, beside that of the tries")
    parser.add_argument("--rank-seeds", type=int, default=1, help="of runs on two ranks")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="of `steps`")
    parser.add_argument("--rounds", type=int, default=3, help="of `steps`, with the small model")
    parser.add_argument("--large-rounds", type=int, default=1, help="the same with the large one")
    parser.add_argument("--batch-size", type=int, default=512, help="of `steps`")
    parser.add_argument("--bubble-examples", type=int, default=50 * 4096, help="of a job of `bubbles`")
    parser.add_argument("--share-examples", type=int, default=60_000, help="synthetic examples of `shares`")
    parser.add_argument("--share-seeds", type=int, default=2, help="of `shares`")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="of `shares`")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time, of the parts with NE")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    rehearsal={
        "names": ["movielens", "steps", "costs", "simulated"], "ratings": 3_000, "seeds": 1, "models": ["small"],
        "rounds": 1, "batch_size": 32,
    },
    packages=TRAINING_PACKAGES,
    facts=data_notes,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
