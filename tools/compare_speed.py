"""Speed of two checkouts: their benchmarks run interleaved, and every figure is compared as new / old.

    python -m tools.compare_speed OLD NEW [--cases planner store peers pipeline] [--rounds 5] [--quick] [--json FILE]
    python -m tools.compare_speed OLD NEW --old "MODULE FLAGS" --new "MODULE FLAGS" --values plan_ms --labels policy

    every round:  case 1 of one checkout, case 1 of the other, case 2 …     (which checkout goes first alternates)
    JSON of a run ──figures──> name -> number ──ratio of the same round──> median, range

OLD and NEW are folders. A command runs in its checkout, and its JSON is every *.json file in the folder that ``{out}``
stands for. Figures are found by field name wherever they are in the JSON, so layouts of modules and of results can
differ: a record with a field named in --values gives a figure, which is named after its --labels. All figures of the
built-in cases are times, and each case has one of unchanged code (np.sort, raw socket, torch) as a control.

Exit codes: 0 done; 1 a command failed (its output is shown); 2 the checkouts have no figure in common.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.report import table
from benchmarks.harness.rounds import paired_ratios, turns

__all__ = ["CASES", "Case", "Command", "figures", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A benchmark's command line.

    Attributes:
        words: module and flags; ``{out}`` is the folder of the results.
        needs: path that a checkout has if this command fits it.
        quick: flags for tiny sizes.
    """

    words: str
    needs: str = "."
    quick: str = ""

    def argv(self, out: Path, *, quick: bool) -> list[str]:
        """The words after ``python -m``."""
        return shlex.split(f"{self.words} {self.quick if quick else ''}".format(out=out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One benchmark.

    Attributes:
        commands: the first one that fits a checkout runs there.
        values: fields that are figures: a number, a list of numbers (its median counts) or a mapping of numbers.
        labels: fields of the same record that name a figure.
    """

    commands: Sequence[Command]
    values: Sequence[str]
    labels: Sequence[str] = ()

    def command(self, checkout: Path) -> Command:
        """The command for a checkout. ValueError: none fits."""
        for command in self.commands:
            if (checkout / command.needs).exists():
                return command
        raise ValueError(f"{checkout}: expected {' or '.join(command.needs for command in self.commands)}")


_HARNESS = "benchmarks/harness"
_PLANNER_QUICK = "--batch-size 256 --lookahead 8 --cache-rows 20000 --batches 10"
_PEERS = "benchmarks.peers.main --repeats 1 --contenders"

CASES: Mapping[str, Case] = {
    "planner": Case(
        commands=(
            Command(words="benchmarks.planner.main --out {out}", needs=_HARNESS, quick=_PLANNER_QUICK),
            Command(words="benchmarks.planner.main --json {out}/results.json", quick=_PLANNER_QUICK),
        ),
        values=("plan_ms", "sort_ms"),
        labels=("ids", "policy", "ranks", "assign"),
    ),
    "store": Case(
        commands=(
            Command(words="benchmarks.store.main --pin --out {out}", needs=_HARNESS, quick="--rows 500 --repeats 5"),
            Command(words="benchmarks.store.main --pin --json {out}/results.json", quick="--rows 500 --repeats 5"),
        ),
        values=("median_ms",),
    ),
    "peers": Case(
        commands=(
            Command(
                words=f"{_PEERS} 'ours cached' torchrec --settings criteo narrow --out {{out}}",
                needs=_HARNESS,
                quick="--settings narrow --tries 1",
            ),
            Command(
                words=f"{_PEERS} 'ours cached,torchrec' --settings criteo,narrow --out {{out}}",
                quick="--settings narrow --tries 1",
            ),
        ),
        values=("step_s",),
        labels=("setting", "contender"),
    ),
    "pipeline": Case(
        commands=(
            Command(words="benchmarks.pipeline.main --out {out}", needs=_HARNESS, quick="--rounds 1 --only small"),
            Command(
                words="benchmarks.pipeline.main --json {out}/results.json",
                quick="--rounds 1 --only small",
            ),
        ),
        values=("ours_ms", "torch_ms"),
        labels=("workload", "schedule"),
    ),
}

#: Values of labels that were renamed: old -> new.
RENAMED = {"paper": "drop-unused"}


def figures(content: Any, case: Case) -> dict[str, float]:
    """Figures of a run by name: ``labels: field``, with the median of figures of the same name."""
    found: dict[str, list[float]] = {}
    for name, value in _figures(content, case, ""):
        found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def _figures(content: Any, case: Case, place: str) -> Iterator[tuple[str, float]]:
    """`place`: key of the content in its parent, which names a record without labels."""
    if isinstance(content, list):
        for item in content:
            yield from _figures(item, case, place)
    if not isinstance(content, dict):
        return
    labels = [str(content[label]) for label in case.labels if label in content]
    name = ", ".join(RENAMED.get(label, label) for label in labels) or place
    for key, value in content.items():
        if key not in case.values:
            yield from _figures(value, case, key)
        elif isinstance(value, dict):
            yield from ((f"{name}: {key} {inner}", float(number)) for inner, number in value.items())
        elif value is not None:
            yield f"{name}: {key}", statistics.median(value) if isinstance(value, list) else float(value)


def measure(checkout: Path, case: Case, command: Command, *, python: str, quick: bool) -> dict[str, float]:
    """Figures of one run. RuntimeError, with its output: the command failed."""
    with tempfile.TemporaryDirectory(prefix="bagpipe-speed-") as out:
        argv = [python, "-m", *command.argv(Path(out), quick=quick)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(argv, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{checkout}: {shlex.join(argv)}\n{(done.stdout + done.stderr)[-4000:]}")
        contents = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
    return figures(contents, case)


def compare(
    checkouts: Mapping[str, Path],
    cases: Mapping[str, Case],
    commands: Mapping[tuple[str, str], Command],
    *,
    rounds: int,
    python: str,
    quick: bool,
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Case -> checkout -> figure -> its value in every round; `commands` are those of (case, checkout)."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        name: {checkout: {} for checkout in checkouts} for name in cases
    }
    for number in range(rounds):
        order = [checkout for turn, checkout in turns(list(checkouts), number + 1) if turn == number]
        for name, case in cases.items():
            for checkout in order:
                command = commands[name, checkout]
                values = measure(checkouts[checkout], case, command, python=python, quick=quick)
                for figure, value in values.items():
                    found[name][checkout].setdefault(figure, []).append(value)
                print(f"round {number + 1}/{rounds}: {name}, {checkout}", file=sys.stderr, flush=True)
    return found


def report(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[tuple[str, ...]]:
    """Rows of the table: figures that both checkouts have."""
    rows = []
    for name, sides in found.items():
        for figure, new in sides["new"].items():
            old = sides["old"].get(figure)
            if old is not None and len(old) == len(new) and all(old):
                ratio = paired_ratios(new, old)
                values = (f"{statistics.median(side):.4g}" for side in (old, new))
                rows.append((name, figure, *values, f"{ratio.median:.3f}", f"{ratio.least:.3f} to {ratio.most:.3f}"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--old", metavar="COMMAND", help="module and flags for OLD, instead of --cases")
    parser.add_argument("--new", metavar="COMMAND", help="module and flags for NEW (default: those of --old)")
    parser.add_argument("--values", nargs="+", default=[], metavar="FIELD", help="figures of --old and --new")
    parser.add_argument("--labels", nargs="+", default=[], metavar="FIELD", help="names of figures of --old and --new")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that both checkouts run")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path, help="file for the values of every round")
    options = parser.parse_args(argv)
    checkouts = dict(zip(("old", "new"), (folder.resolve() for folder in options.folders), strict=True))
    cases = {name: CASES[name] for name in options.cases}
    commands = {(name, side): case.command(path) for name, case in cases.items() for side, path in checkouts.items()}
    if options.old:
        if not options.values:
            parser.error("--old needs --values")
        cases = {"command": Case(commands=(), values=options.values, labels=options.labels)}
        commands = {("command", side): Command(words=getattr(options, side) or options.old) for side in checkouts}
    try:
        found = compare(checkouts, cases, commands, rounds=options.rounds, python=options.python, quick=options.quick)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    rows = report(found)
    print(table(("case", "figure", "old", "new", "new / old", "range"), rows), end="")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if rows else 2


if __name__ == "__main__":
    sys.exit(main())
