"""`python -m tests.harness.same_bits`: the plan's jobs at two commits, a line for each; exit code 1 if any differs."""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, InputError
from bagpipe.util.program import run_program
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.twin import Outcome
from tests.harness.in_threads import in_threads
from tests.harness.same_bits.comparison import difference
from tests.harness.same_bits.plan import JOBS, Job
from tests.harness.same_bits.runs import Known, commit_of, run_from, run_job, worktree, write_data
from tests.harness.verdicts import show, write_json

__all__ = ["Verdict", "compare_job", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a comparison.

    Attributes:
        job: name of the job.
        ranks: of the job.
        end: what was compared, in words.
        seconds: wall time.
        problem: empty if nothing differs.
        commands: of all starts, if there is a problem.
    """

    job: str
    ranks: int
    end: str
    seconds: float
    problem: str = ""
    commands: tuple[str, ...] = ()


def main() -> None:
    """Run the program and exit with its code. A SIGTERM ends it as Ctrl-C does, without the worktree."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_program(_same_bits))


def _same_bits(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.same_bits", description=__doc__)
    parser.add_argument("--base", default="", metavar="COMMIT", help="commit to compare this checkout with")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="jobs, such as dlrm or 'chimera*'")
    parser.add_argument(
        "--known",
        type=Path,
        default=Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bagpipe-same-bits",
        metavar="FOLDER",
        help="where the ends of jobs at other commits are kept (default: %(default)s)",
    )
    parser.add_argument("--anew", action="store_true", help="run the jobs at the commit though their ends are known")
    parser.add_argument("--json", default="", metavar="FILE", help="write all verdicts here")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        raise InputError(f"--jobs: expected at least 1, got {options.jobs}")
    if not options.base:
        raise InputError("--base: expected a commit, as in make same-bits BASE=main, got nothing")
    jobs = _chosen(options.only)
    commit = commit_of(options.base)
    start_s = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="same-bits-"))
    wrong: list[str] | None = None
    try:
        known = Known(options.known / commit)
        verdicts = show(
            _run_many(jobs, commit, known, root, at_a_time=options.jobs, anew=options.anew),
            lambda verdict: f"{verdict.job:24} {verdict.ranks} ranks  {verdict.seconds:6.2f} s  {verdict.end}",
            lambda verdict: "\n".join(f"    {command}" for command in verdict.commands),
        )
        wrong = [verdict.job for verdict in verdicts if verdict.problem]
    finally:
        if not wrong:
            shutil.rmtree(root)
    print(
        f"{len(verdicts)} jobs at {commit[:12]} and here in {time.monotonic() - start_s:.0f} s: {len(wrong)} differ"
        + (f": {', '.join(wrong)}; files in {root}" if wrong else "")
    )
    write_json(options.json, verdicts)
    return EXIT_FAILED if wrong else EXIT_DONE


def _chosen(patterns: Sequence[str]) -> list[Job]:
    """The jobs that the patterns name, those with most ranks first."""
    names = [job.name for job in JOBS]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"--only: expected one of {', '.join(names)}, got {pattern}")
    chosen = [job for job in JOBS if any(fnmatch.fnmatch(job.name, pattern) for pattern in patterns)]
    return sorted(chosen, key=lambda job: -job.ranks)


def _run_many(
    jobs: Sequence[Job], commit: str, known: Known, root: Path, *, at_a_time: int, anew: bool
) -> Iterator[Verdict]:
    """Verdicts in the order of their ends. The commit is checked out only if a job has to run there."""
    data = write_data([job.data for job in jobs], root)
    places = {job.name: known.place(job, data[job.data]) for job in jobs}
    if anew:
        for place in places.values():
            shutil.rmtree(place, ignore_errors=True)
    with ExitStack() as stack:
        head = stack.enter_context(Site(root / "head-site", Path.cwd()))
        base = None
        if any(known.get(place) is None for place in places.values()):
            checkout = stack.enter_context(worktree(commit, root / "checkout"))
            base = stack.enter_context(Site(root / "base-site", checkout))

        def compare(job: Job) -> Verdict:
            return compare_job(job, base, head, known, data[job.data], root)

        yield from in_threads(jobs, lambda: nullcontext(compare), num_threads=at_a_time, name="same-bits")


def compare_job(job: Job, base: Site | None, head: Site, known: Known, data: Mapping[str, str], root: Path) -> Verdict:
    """Run a job at both checkouts, and at HEAD from what it left at BASE.

    Args:
        job: what is compared.
        base: the other checkout; None: the job's end there is known.
        head: this checkout.
        known: ends at the other checkout, to which this one is added.
        data: values of the data's keys.
        root: where the files of the runs go.
    """
    start_s = time.monotonic()
    place = known.place(job, data)
    old, end = known.get(place), "BASE known, HEAD run"
    if old is None:
        assert base is not None, "checked out where an end is not known"
        end, folder = "BASE run, HEAD run", root / "base" / job.name
        old = run_job(job, base, data, folder, half=True)
        known.put(place, old, folder)
    new = run_job(job, head, data, root / "head" / job.name)
    outcomes, problems = [old, new], [difference(old, new)]
    if old.result is None and old.code == EXIT_INPUT and new.result is not None and not new.problem:
        end, problems = "refused at BASE, HEAD run", []  # what one commit refuses, a later one may do
    if (
        old.result is not None
        and not old.problem
        and (mixed := run_from(job, head, data, place, root / "mixed" / job.name))
    ):
        outcomes.append(mixed)
        end += ", HEAD from BASE's files"
        problem = difference(old, mixed, ("BASE", "HEAD from BASE's files")) or _unused(mixed)
        problems.append(problem and f"from BASE's files: {problem}")
    problem = "; ".join(filter(None, problems))
    return Verdict(
        job=job.name,
        ranks=job.ranks,
        end=end,
        seconds=round(time.monotonic() - start_s, 2),
        problem=problem,
        commands=tuple(command for outcome in outcomes for command in outcome.commands) if problem else (),
    )


def _unused(mixed: Outcome) -> str:
    """The problem of a run that began anew in spite of BASE's files; empty: it did not."""
    result = mixed.result or {}
    begun = result.get("resumed_from") is not None or result.get("started_from") is not None
    return "" if begun else "they were not used"
