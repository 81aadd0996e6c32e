"""`python -m tests.harness.chaos`: many runs, a line for each; exit code 1 if any result is not exact."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, InputError
from bagpipe.util.program import run_program
from tests.harness.chaos.jobs import JOBS
from tests.harness.chaos.run import PRELOADED, Reference, Run, Verdict, draw_job, make_reference
from tests.harness.clock import ClockJump, find_compiler
from tests.harness.faults import KINDS, FaultKind, kinds_named
from tests.harness.verdicts import show, write_json
from tests.harness.zygote import Zygote

__all__ = ["main", "run_many"]


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_chaos))


def _chaos(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others count on (default: %(default)s)")
    parser.add_argument(
        "--kinds", default="", help=f"of faults, separated by commas: {', '.join(k.name for k in KINDS)}"
    )
    parser.add_argument("--ranks", default="1,2", help="sizes of jobs, separated by commas (default: %(default)s)")
    parser.add_argument("--jobs", default="", help=f"names of jobs: {', '.join(job.name for job in JOBS)}")
    parser.add_argument("--json", default="", metavar="FILE", help="write all verdicts here")
    options = parser.parse_args(argv)
    try:
        kinds = kinds_named(options.kinds)
        ranks = {int(number) for number in options.ranks.split(",")}
    except ValueError as error:
        raise InputError(str(error)) from None
    if options.runs < 1:
        raise InputError(f"--runs: expected at least 1, got {options.runs}")
    names = {name for name in options.jobs.split(",") if name}
    start_s = time.monotonic()
    again = f"python -m tests.harness.chaos --runs 1 --ranks {options.ranks}"
    again += "".join(f" --{name} {value}" for name in ("kinds", "jobs") if (value := getattr(options, name)))
    seeds = range(options.seed, options.seed + options.runs)
    verdicts = show(
        run_many(seeds, kinds=kinds, ranks=ranks, jobs=names),
        lambda verdict: (
            f"seed {verdict.seed:<6} {verdict.job:9} {verdict.seconds:6.2f} s  {verdict.num_starts} starts  "
            f"{verdict.num_fired} fired of {'; '.join(verdict.faults)}"
        ),
        lambda verdict: f"    again: {again} --seed {verdict.seed}\n    left in {verdict.folder}",
    )
    wrong = [verdict.seed for verdict in verdicts if verdict.problem]
    for line, count in Counter(_shape(line) for verdict in verdicts for line in verdict.errors).most_common():
        print(f"{count:5} x {line}")
    print(
        f"{len(verdicts)} runs, seeds {seeds[0]} to {seeds[-1]}, "
        f"{sum(verdict.num_fired for verdict in verdicts)} faults, "
        f"{sum(verdict.num_starts for verdict in verdicts)} starts in {time.monotonic() - start_s:.0f} s: "
        f"{len(verdicts) - len(wrong)} equal, {len(wrong)} wrong" + (f", seeds {wrong}" if wrong else "")
    )
    write_json(options.json, verdicts)
    return EXIT_FAILED if wrong else EXIT_DONE


def run_many(
    seeds: Sequence[int],
    *,
    kinds: Sequence[FaultKind] = KINDS,
    ranks: set[int] | None = None,
    jobs: set[str] | None = None,
    programs: Path | None = None,
) -> Iterator[Verdict]:
    """Run one after the other.

    Args:
        seeds: one per run.
        kinds: of faults; kinds that this machine does not support are left out.
        ranks: allowed world sizes; None: all.
        jobs: their names; None or empty: all.
        programs: checkout whose trainer and cacher are run; None: the current folder.

    Raises:
        InputError: no job is left.
    """
    chosen = [job for job in JOBS if (ranks is None or job.world_size in ranks) and (not jobs or job.name in jobs)]
    if not chosen:
        raise InputError(f"no such job among {', '.join(job.name for job in JOBS)}")
    references: dict[str, Reference] = {}
    with ExitStack() as stack:
        clock = None
        if find_compiler() is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-clock-")))
            clock = stack.enter_context(ClockJump(folder))
        possible = tuple(kind for kind in kinds if kind.needs != "clock" or clock is not None)
        environment = clock.environment if clock is not None else {}
        zygote = stack.enter_context(Zygote(PRELOADED, programs or Path.cwd(), environment))
        for seed in seeds:
            job = draw_job(seed, chosen)
            if job.name not in references:
                references[job.name] = make_reference(job, zygote)
            run = Run(seed=seed, job=job, kinds=possible, zygote=zygote, reference=references[job.name], clock=clock)
            verdict = run.go()
            if not verdict.problem:
                shutil.rmtree(run.folder)
            yield verdict


def _shape(line: str) -> str:
    """An error line without the parts that differ from run to run."""
    line = re.sub(r"/tmp/\S+?/(?=[\w.-]+(\s|$|:))", "…/", line)
    return re.sub(r"\d+", "N", line)[:160]
