"""Does bagpipe's trainer give the scores of FuxiCTR, on the same examples and the same models?

    python -m benchmarks.bars.main [adagrad] [adam] [own-starts] --data.path FILE --fuxictr PYTHON --zoo FOLDER

Needs an interpreter with FuxiCTR, and a checkout of its repository: the README says how to make both. Outcomes are
kept in --work; a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bagpipe.errors import InputError
from bagpipe.util.environment import check_environment
from benchmarks.bars.journal import Journal
from benchmarks.bars.ours import flags_of, measure_ours
from benchmarks.bars.prepare import Prepared, prepare
from benchmarks.bars.report import tables
from benchmarks.bars.same_start import JobOfOurs
from benchmarks.bars.settings import BATCH_SIZE, DROPOUT, MODELS, Outcome, Run
from benchmarks.bars.theirs import Fuxictr
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.click_logs import add_data_path, data_notes
from benchmarks.harness.machine import TRAINING_PACKAGES

_MIN_COUNT = 10
_SHARES = (0.7, 0.1, 0.2)
_PARTS = ("adagrad", "adam", "own-starts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both systems with prepared data.

    Attributes:
        fuxictr: FuxiCTR.
        data: folder of `prepare`.
        prepared: its sizes.
        journal: outcomes of runs.
    """

    fuxictr: Fuxictr
    data: Path
    prepared: Prepared
    journal: Journal

    def outcome(self, run: Run) -> Outcome:
        """Outcome of a run, measured unless the journal has it."""
        return self.journal.get(run, self._measure)

    def _measure(self, run: Run) -> Outcome:
        if run.system in ("ours", "all-rows"):
            return measure_ours(run, self.data, self._job(run).parameters)
        steps = math.ceil(self.prepared.num_examples["train"] / BATCH_SIZE)
        if not run.same_start:
            return self.fuxictr.measure(run, steps)
        with tempfile.TemporaryDirectory() as folder:
            self._job(run).write(Path(folder))
            return self.fuxictr.measure(run, steps, Path(folder))

    def _job(self, run: Run) -> JobOfOurs:
        return JobOfOurs.of(run.model, flags_of(run, self.data))


def runs_of(part: str, models: Sequence[str], seeds: int) -> Iterator[Run]:
    """Runs of a part; the systems take turns."""
    systems = ("fuxictr", "sparse-adam", "all-rows", "ours", "lazy") if part == "adam" else ("fuxictr", "ours")
    for model in models:
        for seed in range(seeds):
            for system in systems:
                if part == "own-starts":
                    yield Run(system=system, model=model, optimizer="adam", seed=seed, epochs=20, dropout=DROPOUT)
                else:
                    yield Run(system=system, model=model, optimizer=part, seed=seed, same_start=True)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    names = options.names or list(_PARTS)
    unknown = [name for name in names if name not in _PARTS]
    if unknown:
        raise InputError(f"expected parts among {', '.join(_PARTS)}, got {unknown[0]!r}")
    check_environment()
    bench = _open(options)
    return {name: partial(_measure, bench, name, options.models, options.seeds) for name in names}


def _open(options: argparse.Namespace) -> Bench:
    path = Path(options.path)
    if not path.is_file():
        raise InputError(f"--data.path must be a file of Criteo's click logs, got {options.path or 'none'}")
    fuxictr = Fuxictr(python=options.fuxictr, zoo=options.zoo, data=options.work / "data")
    version = fuxictr.check()
    prepared = prepare(path, fuxictr.data, min_count=_MIN_COUNT, shares=_SHARES)
    basis = f"{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}, fuxictr {version}"
    journal = Journal(options.work / "runs.jsonl", basis)
    return Bench(fuxictr=fuxictr, data=fuxictr.data, prepared=prepared, journal=journal)


def _measure(bench: Bench, name: str, models: Sequence[str], seeds: int, part: Part) -> None:
    for run in runs_of(name, models, seeds):
        outcome = bench.outcome(run)
        part.add({"run": asdict(run), "outcome": asdict(outcome)})
        part.say(f"{run.model} {run.system} #{run.seed}: AUC {outcome.auc:.5f}, {len(outcome.history)} epochs")


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="|".join(_PARTS), help="default: all")
    add_data_path(parser)
    parser.add_argument("--fuxictr", type=Path, default=Path("fuxictr/bin/python"), help="interpreter with FuxiCTR")
    parser.add_argument("--zoo", type=Path, default=Path("FuxiCTR"), help="checkout of FuxiCTR's repository")
    parser.add_argument("--work", type=Path, default=Path("datasets/bars"), help="folder of split data and outcomes")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)


def _machine(options: argparse.Namespace) -> Mapping[str, str]:
    return {"FuxiCTR": Fuxictr(python=options.fuxictr, zoo=options.zoo, data=options.work).check()}


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    rehearsal={"seeds": 2, "models": ["DeepFM"], "names": ["adagrad"]},
    packages=TRAINING_PACKAGES,
    machine=_machine,
    facts=data_notes,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
