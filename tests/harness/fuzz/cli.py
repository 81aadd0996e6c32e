"""`python -m tests.harness.fuzz`: many random jobs, a line for each; exit code 1 if any twin differs."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, InputError
from bagpipe.util.program import run_program
from tests.harness.fuzz.draw import Draw
from tests.harness.fuzz.drawing import STORES, draw
from tests.harness.fuzz.pairs import pair_array
from tests.harness.fuzz.shrink import shrink
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.trial import Verdict, run_trial
from tests.harness.in_threads import in_threads
from tests.harness.verdicts import show, write_json

__all__ = ["main", "run_many"]


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_fuzz))


def _fuzz(argv: Sequence[str]) -> int:
    options = _options(argv)
    start_s = time.monotonic()
    stores = (*STORES, "cluster") if options.cluster else STORES
    draws = partial(_draws, options.seed, stores=stores)
    numbers = range(options.first, options.first + (options.runs or 20))
    lines: Sequence[str] = ()
    if options.pairs:
        array = pair_array(options.seed)
        draws, lines = partial(array.draws, stores=stores), array.lines()
        numbers = range(len(array))[options.first : None if options.runs is None else numbers.stop]
        if not numbers:
            raise InputError(f"--first: expected less than {len(array)}, the number of jobs, got {options.first}")
    if options.list:
        print("\n".join([*(f"{number:4}  {next(draws(number))}" for number in numbers), *lines]))
        return EXIT_DONE
    again = f"python -m tests.harness.fuzz --runs 1 --seed {options.seed}"
    again += f"{' --cluster' if options.cluster else ''}{' --pairs' if options.pairs else ''}"
    verdicts = show(
        run_many(
            draws,
            numbers,
            jobs=options.jobs,
            with_cluster=options.cluster,
            shrinks=not options.no_shrink,
            must_train=options.pairs,
        ),
        lambda verdict: (
            f"{verdict.number:4} {verdict.seconds:6.2f} s  {verdict.num_starts} starts, {verdict.num_kills} kills  "
            f"{verdict.draw}: {verdict.end}"
        ),
        lambda verdict: _report(verdict, f"{again} --first {verdict.number}"),
    )
    wrong = [verdict.number for verdict in verdicts if verdict.problem]
    print(
        f"{len(verdicts)} runs of seed {options.seed}, {sum(verdict.num_starts for verdict in verdicts)} starts, "
        f"{sum(verdict.num_kills for verdict in verdicts)} kills, "
        f"{sum(verdict.num_comparisons for verdict in verdicts)} comparisons in {time.monotonic() - start_s:.0f} s: "
        f"{len(wrong)} wrong" + (f", numbers {wrong}" if wrong else "")
    )
    write_json(options.json, verdicts)
    return EXIT_FAILED if wrong else EXIT_DONE


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """The flags.

    Raises:
        InputError: a number is too small.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.harness.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, help="how many (default: 20; with --pairs all from the first)")
    parser.add_argument("--seed", type=int, default=1, help="of all draws (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (default: %(default)s)")
    parser.add_argument("--pairs", action="store_true", help="jobs with every pair of values of two features")
    parser.add_argument("--list", action="store_true", help="print the draws, and run none")
    parser.add_argument("--cluster", action="store_true", help="draw a cluster of three servers too")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a simpler draw where one is wrong")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all verdicts here")
    options = parser.parse_args(argv)
    for name, least in (("runs", 1), ("jobs", 1), ("first", 0)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            raise InputError(f"--{name}: expected at least {least}, got {getattr(options, name)}")
    return options


def _draws(seed: int, number: int, stores: Sequence[str]) -> Iterator[Draw]:
    """The one draw of a number."""
    yield draw(seed, number, stores=stores)


def _report(verdict: Verdict, again: str) -> str:
    """Commands, folders and simpler draw of a wrong run, for the person who repeats it."""
    lines = [f"again: {again}", *verdict.commands, f"left in {verdict.folder}"]
    if verdict.simpler is not None:
        lines += [f"simpler, also wrong: {verdict.simpler.draw}: {verdict.simpler.problem}"]
        lines += [*verdict.simpler.commands, f"left in {verdict.simpler.folder}"]
    return "\n".join(f"    {line}" for line in lines)


def run_many(
    draws: Callable[[int], Iterator[Draw]],
    numbers: Sequence[int],
    *,
    jobs: int = 1,
    with_cluster: bool = False,
    shrinks: bool = False,
    must_train: bool = False,
    programs: Path | None = None,
) -> Iterator[Verdict]:
    """Run draws, in order of their ends.

    Args:
        draws: the draw of a number; of several those that a trainer refuses give way to the next.
        numbers: of the draws.
        jobs: draws at a time, each with an interpreter and servers of its own.
        with_cluster: a draw may have a cluster.
        shrinks: look for a simpler draw that is wrong too.
        must_train: it is wrong too if all draws of a number are refused.
        programs: checkout whose trainer and cacher are run; None: the current folder.
    """

    @contextmanager
    def worker() -> Iterator[Callable[[int], Verdict]]:
        with tempfile.TemporaryDirectory(prefix="fuzz-site-") as folder:
            with Site(Path(folder), programs or Path.cwd(), with_cluster) as site:

                def trial(number: int) -> Verdict:
                    drawn, verdict = _first_trained(draws(number), site)
                    if must_train and not verdict.problem and not verdict.has_trained:
                        return dataclasses.replace(verdict, problem="all of its draws are refused")
                    return _with_simpler(drawn, verdict, site) if verdict.problem and shrinks else verdict

                yield trial

    for verdict in in_threads(numbers, worker, num_threads=jobs, name="fuzz"):
        if not verdict.problem:
            shutil.rmtree(verdict.folder)
        yield verdict


def _first_trained(draws: Iterator[Draw], site: Site) -> tuple[Draw, Verdict]:
    """The first draw that is not refused, and its verdict; the last one if all are."""
    last: Verdict | None = None
    for drawn in draws:
        if last is not None:
            shutil.rmtree(last.folder)
        last = run_trial(drawn, site)
        if last.problem or last.has_trained:
            break
    assert last is not None, "a number has a draw"
    return drawn, last


def _with_simpler(drawn: Draw, wrong: Verdict, site: Site) -> Verdict:
    """The verdict with that of a simpler draw."""
    found: dict[Draw, Verdict] = {}

    def is_wrong(simpler: Draw) -> bool:
        found[simpler] = run_trial(simpler, site)
        return bool(found[simpler].problem)

    simplest = shrink(drawn, is_wrong)
    for simpler, verdict in found.items():
        if simpler != simplest:
            shutil.rmtree(verdict.folder)
    return dataclasses.replace(wrong, simpler=found.get(simplest))
