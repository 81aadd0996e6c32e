"""`python -m tests.harness.histories`: many histories, a line for each; exit code 1 if one has an anomaly."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, InputError
from bagpipe.util.program import run_program
from tests.harness.histories.broken import DEFECTS
from tests.harness.histories.checker import check
from tests.harness.histories.events import from_lines
from tests.harness.histories.history import paired
from tests.harness.histories.plan import FAULT_KINDS, SERVER_KINDS
from tests.harness.histories.run import Verdict, run_many
from tests.harness.verdicts import show

__all__ = ["main"]


def main() -> None:
    """Run the program and exit with its code."""
    sys.exit(run_program(_histories))


def _histories(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.histories", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others count on (default: %(default)s)")
    parser.add_argument("--servers", default="", help=f"separated by commas: {', '.join(SERVER_KINDS)}")
    kinds = ", ".join(kind.name for kind in FAULT_KINDS)
    parser.add_argument("--kinds", default="", help=f"of faults, separated by commas: {kinds}")
    parser.add_argument("--defect", default="", help=f"of the writers' stores, to see it found: {', '.join(DEFECTS)}")
    parser.add_argument(
        "--out",
        default=str(Path(tempfile.gettempdir()) / "bagpipe-histories"),
        metavar="FOLDER",
        help="for histories with anomalies (default: %(default)s)",
    )
    parser.add_argument("--check", default="", metavar="FILE", help="judge the history in this file, make none")
    options = parser.parse_args(argv)
    if options.check:
        return _check(Path(options.check))
    if options.runs < 1:
        raise InputError(f"--runs: expected at least 1, got {options.runs}")
    if options.defect and options.defect not in DEFECTS:
        raise InputError(f"--defect: expected one of {', '.join(DEFECTS)}, got {options.defect}")
    logging.getLogger("bagpipe").addHandler(logging.NullHandler())  # of failovers, which are planned
    start_s = time.monotonic()
    names = {name: [each for each in getattr(options, name).split(",") if each] for name in ("servers", "kinds")}
    again = "python -m tests.harness.histories --runs 1"
    again += "".join(f" --{name} {','.join(given)}" for name, given in names.items() if given)
    again += f" --defect {options.defect}" if options.defect else ""
    seeds = range(options.seed, options.seed + options.runs)
    try:
        verdicts = show(
            run_many(
                seeds,
                servers=names["servers"],
                kinds=names["kinds"],
                defect=options.defect,
                out=Path(options.out),
            ),
            _line,
            lambda verdict: _report(verdict, f"{again} --seed {verdict.plan.seed}"),
            good="no anomaly",
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    wrong = [verdict.plan.seed for verdict in verdicts if verdict.problem]
    total: Counter[str] = sum((verdict.num_operations for verdict in verdicts), Counter())
    print(
        f"{len(verdicts)} histories, seeds {seeds[0]} to {seeds[-1]}, {_counts(total)} operations, "
        f"{sum(verdict.num_appends for verdict in verdicts)} acknowledged appends, "
        f"{sum(len(verdict.plan.faults) for verdict in verdicts)} faults in {time.monotonic() - start_s:.0f} s: "
        f"{len(wrong)} with anomalies" + (f", seeds {wrong}" if wrong else "")
    )
    return EXIT_FAILED if wrong else EXIT_DONE


def _line(verdict: Verdict) -> str:
    return f"seed {verdict.plan.seed:<6} {verdict.seconds:6.2f} s  {verdict.plan}  {_counts(verdict.num_operations)}"


def _counts(operations: Counter[str]) -> str:
    return ", ".join(f"{operations[name]} {name}" for name in ("ok", "fail", "unknown"))


def _report(verdict: Verdict, again: str) -> str:
    lines = [*map(str, verdict.findings), f"again: {again}", f"history: {verdict.file}"]
    return "\n".join(f"    {line}" for line in lines)


def _check(file: Path) -> int:
    try:
        findings = check(paired(from_lines(file.read_text())))
    except (OSError, ValueError) as error:
        raise InputError(f"--check {file}: {error}") from None
    for finding in findings:
        print(finding)
    print(f"{file}: {len(findings)} anomalies")
    return EXIT_FAILED if findings else EXIT_DONE
