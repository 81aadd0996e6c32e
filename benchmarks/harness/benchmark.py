"""`Benchmark`: what one benchmark gives to the harness, which parses, measures, keeps and reports.

    flags ──parts──> name -> measure(Part) ──keep──> results.json ──tables──> README between its marks, or tables.md
                                                                  └─draw────> SVG

Flags of every benchmark: --out DIR (default: the benchmark's own folder, which publishes the figures), --report (tables
and plot again from results.json) and --rehearse (tiny sizes into a folder of its own: shows that everything runs).
Exit codes: 0 done; 1 a part failed, the others are kept; 2 cannot run here or with these flags (one line says why).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bagpipe.errors import InputError, JobError
from benchmarks.harness.machine import code_digest, describe_machine, load_average
from benchmarks.harness.report import fill_in, provenance
from benchmarks.harness.results import Results

__all__ = ["Benchmark", "Measure", "Part", "Values", "found_of", "run_benchmark"]

#: Content of a results.json.
Values: TypeAlias = Mapping[str, Any]


class Part:
    """One part while it is measured.

    Args:
        results: it is kept in.
        name: of the part.

    Attributes:
        found: what it has found so far.
    """

    def __init__(self, results: Results, name: str) -> None:
        self._results = results
        self._name = name
        self._start_s = time.perf_counter()
        self.found: Any = None

    def say(self, line: str) -> None:
        """Print a line and the time since the part began."""
        print(f"[{time.perf_counter() - self._start_s:5.0f} s] {line}", flush=True)

    def keep(self, found: Any) -> None:
        """Write what is found so far: plain JSON values."""
        self.found = found
        self._results.put(self._name, found)

    def add(self, record: Any) -> None:
        """Append a record to the list of what is found, and write it."""
        self.keep([*(self.found or []), record])


Measure: TypeAlias = Callable[[Part], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        folder: its own, with the README.
        about: text of --help.
        flags: adds its flags to the parser.
        parts: what a command line measures, in order. InputError: it cannot be measured here.
        tables: Markdown of all results.
        details: longer tables, written to tables.md.
        draw: writes plots into a folder. ModuleNotFoundError: there is no matplotlib.
        rehearsal: values of its flags under --rehearse.
        packages: whose versions matter.
        counts: it finds counts that no machine changes, so results of several machines are kept side by side.
        machine: entries of the machine besides processor, system and versions.
        facts: of a run, besides command, code, load and settings; `notes` are lines for the report.
        rest: option that takes unknown words of the command line. Empty: there must be none.
    """

    folder: Path
    about: str
    flags: Callable[[argparse.ArgumentParser], object]
    parts: Callable[[argparse.Namespace], Mapping[str, Measure]]
    tables: Callable[[Values], str]
    details: Callable[[Values], str] | None = None
    draw: Callable[[Values, Path], None] | None = None
    rehearsal: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ("numpy",)
    counts: bool = False
    machine: Callable[[argparse.Namespace], Mapping[str, str]] = lambda options: {}
    facts: Callable[[argparse.Namespace], Mapping[str, Any]] = lambda options: {}
    rest: str = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name


def run_benchmark(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Measure and report as the command line says; the exit code."""
    options = _parse(benchmark, argv)
    folder: Path = options.out or (benchmark.folder / "rehearsal" if options.rehearse else benchmark.folder)
    try:
        if options.report:
            _report(benchmark, Results.read(folder / "results.json").values, folder)
            return 0
        parts = benchmark.parts(options)
    except InputError as error:
        print(f"{benchmark.name}: {error}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    machine = {**benchmark.machine(options), **describe_machine(benchmark.packages)}
    if benchmark.counts:
        machine = {"versions": machine["versions"]}
    results, line = Results.on(folder / "results.json", {"rehearsed": options.rehearse, "machine": machine})
    for text in (*([] if line is None else [line]), *(f"{name}: {value}" for name, value in machine.items())):
        print(f"{benchmark.name}: {text}", flush=True)
    code = _measure(parts, results, _run(benchmark, options, argv))
    if results.parts:
        _report(benchmark, results.values, folder)
    return code


def found_of(values: Values, part: str) -> Any:
    """Findings of a part; None if there are none."""
    return values["parts"].get(part, {}).get("found")


def _parse(benchmark: Benchmark, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}.main",
        description=benchmark.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not benchmark.rest,
    )
    benchmark.flags(parser)
    parser.add_argument("--out", type=Path, help="folder of the results (default: the benchmark's own: it publishes)")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables and plot again from the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: shows that everything runs")
    options, rest = parser.parse_known_args(argv)
    if options.rehearse:
        parser.set_defaults(**benchmark.rehearsal)
    if not benchmark.rest:
        return parser.parse_args(argv)
    return argparse.Namespace(**vars(parser.parse_known_args(argv)[0]), **{benchmark.rest: rest})


def _run(benchmark: Benchmark, options: argparse.Namespace, argv: Sequence[str] | None) -> Mapping[str, Any]:
    words = sys.argv[1:] if argv is None else argv
    harness = ("out", "report", "rehearse")
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark.name}.main", *map(_without_folder, words)]),
        "settings": {name: _plain(value) for name, value in vars(options).items() if name not in harness},
        "code": code_digest(),
        "load average": load_average(),
        **benchmark.facts(options),
    }


def _plain(value: Any) -> Any:
    return _without_folder(str(value)) if isinstance(value, str | Path) else value


def _without_folder(word: str) -> str:
    """A word of a command line without the folders of this machine: an absolute path's last part."""
    flag, equals, value = word.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if value.startswith("/") else word


def _measure(parts: Mapping[str, Measure], results: Results, run: Mapping[str, Any]) -> int:
    """Every part; one that fails does not end the others. The exit code."""
    codes = {0}
    for name, measure in parts.items():
        earlier, part, start_s = results.parts.get(name), Part(results, name), time.perf_counter()
        results.begin(name, run)
        error: Exception | None = None
        try:
            measure(part)
        except (InputError, JobError) as failure:
            print(f"part {name}: {failure}", file=sys.stderr)
            error = failure
        except Exception as failure:  # figures of the other parts must not be lost
            traceback.print_exc()
            error = failure
        except BaseException:  # interrupted: what was published stays unless there is something newer
            if part.found is None:
                results.restore(name, earlier)
            raise
        if error is not None and part.found is None and earlier is not None:
            results.restore(name, earlier)
        else:
            text = None if error is None else f"{type(error).__name__}: {error}"
            results.end(name, time.perf_counter() - start_s, text)
        codes.add(0 if error is None else 2 if isinstance(error, InputError) else 1)
    return 1 if 1 in codes else max(codes)


def _report(benchmark: Benchmark, values: Values, folder: Path) -> None:
    text = benchmark.tables(values).strip() + "\n\n" + "\n".join(provenance(values)) + "\n"
    print("\n" + text)
    is_published = folder == benchmark.folder and not values["rehearsed"]
    if is_published:
        fill_in(folder / "README.md", text)
    if benchmark.details is not None or not is_published:
        (folder / "tables.md").write_text((benchmark.details or (lambda _: text))(values), encoding="utf-8")
    if benchmark.draw is not None:
        try:
            benchmark.draw(values, folder)
        except ModuleNotFoundError as error:
            print(f"no plot: {error}", file=sys.stderr)
