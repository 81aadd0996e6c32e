"""Forecasts of step times against jobs of the trainer on this machine.

    python -m benchmarks.forecast.main [--repeats 3] [--examples 100000] [--out DIR]

For every case: the machine measured (`bagpipe calibrate`), the dense part measured (`bagpipe plan --save-operators`),
the rows counted (`data replay`), the step forecast, and the same job run by the trainer behind a shaped link.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.calibration.machine import measure_machine
from bagpipe.cluster.model import ClusterModel, Link
from bagpipe.forecast.forecast import forecast
from bagpipe.forecast.job import DenseCosts, JobShape
from bagpipe.forecast.stages import staged_dense
from bagpipe.forecast.traffic import RowTraffic, read_traffic, unique_curve
from bagpipe.partition.operators import OperatorGraph
from bagpipe.util.environment import check_environment
from benchmarks.forecast.cases import CASES, Case
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.child import run_child
from benchmarks.harness.machine import TRAINING_PACKAGES, store_server
from benchmarks.harness.report import table
from benchmarks.harness.shaped_link import ShapedServer, check_privileges

_DIM = 16
_BOTTOM_MLP = "64"
_LOOKAHEAD = 32
_TIMEOUT_S = 300.0
_LOG = "log.arrow"
#: Slots that a replay for direct mode has; it uses the counts of unique rows alone.
_REPLAYED_CACHE = 100_000


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    check_environment("cpu")
    check_privileges()
    return {"jobs": partial(_measure, options)}


def _measure(options: argparse.Namespace, part: Part) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synth = ["data", "synth", "--rows", str(options.examples), "--out", str(folder / _LOG)]
        subprocess.run([sys.executable, "-m", *synth], check=True, capture_output=True, timeout=_TIMEOUT_S)
        cases = [case for case in CASES if options.only in case.name][: options.cases or None]
        machines = {ranks: measure_machine(ranks) for ranks in sorted({case.ranks for case in cases})}
        for case in cases:
            machine = _behind_link(machines[case.ranks], case)
            found = forecast(machine, _shape(case, machine, folder))
            part.say(f"{case.name}: forecast {found.step_s * 1e3:.2f} ms ({found.limit})")
            steps = [_job(case, folder) for _ in range(options.repeats)]
            part.say(f"{case.name}: measured {', '.join(f'{step * 1e3:.2f}' for step in steps)} ms")
            record = {"case": case.name, "forecast_s": found.step_s, "limit": found.limit, "measured_s": steps}
            part.add({**record, "op_s": dict(found.op_s)})


def _behind_link(machine: ClusterModel, case: Case) -> ClusterModel:
    """The machine with the case's link between trainers and store."""
    assert machine.stores is not None, "calibrated with one"
    links = {**machine.links, "shaped": Link(bytes_per_s=case.bytes_per_s, latency_s=2e-5)}
    trainers = tuple(replace(hosts, port="shaped") for hosts in machine.trainers)
    return replace(machine, links=links, trainers=trainers, stores=replace(machine.stores, port="shaped"))


def _shape(case: Case, machine: ClusterModel, folder: Path) -> JobShape:
    rows, traffic = _replayed(case, folder)
    graph = _operators(case, folder)
    staged = None
    if case.stages > 1:
        staged = staged_dense(
            graph,
            machine,
            ranks=case.ranks,
            batch_examples=case.batch_examples,
            stages=case.stages,
            microbatches=case.microbatches,
            schedule=case.schedule,
        )
    return JobShape(
        ranks=case.ranks,
        batch_examples=case.batch_examples,
        traffic=rows,
        uniques=unique_curve(traffic),
        dim=_DIM,
        dense=DenseCosts.of_operators(graph),
        staged=staged,
        direct=not case.cache_rows,
    )


def _replayed(case: Case, folder: Path) -> tuple[RowTraffic, tuple[RowTraffic, ...]]:
    """The rows of the case's batches, and those of smaller batches too."""
    out = folder / f"replay-{case.batch_examples}-{case.cache_rows}-{case.ranks}.json"
    if not out.exists():
        sizes = ",".join(str(case.batch_examples // part) for part in (4, 2, 1))
        cache = (case.cache_rows or _REPLAYED_CACHE) // case.ranks
        flags = [*_data_flags(folder), "--data.batch_size", sizes, "--lookahead", str(_LOOKAHEAD)]
        flags += ["--cache_rows", str(cache), "--policy", "belady-window", "--world_size", str(case.ranks)]
        _run(out, "data", "replay", *flags, "--json", str(out))
    traffic = read_traffic(out.read_text(encoding="utf-8"), source=str(out))
    return next(each for each in traffic if each.batch_examples == case.batch_examples), traffic


def _operators(case: Case, folder: Path) -> OperatorGraph:
    """The dense part, measured around the examples of a call."""
    examples = case.batch_examples * case.stages // (case.ranks * case.microbatches)
    out = folder / f"{case.model}-{case.top_mlp}-{examples}.json"
    if not out.exists():
        model = ["--model", case.model, "--top-mlp", case.top_mlp, "--bottom-mlp", _BOTTOM_MLP]
        model += ["--embedding-dim", str(_DIM), "--devices", "1", "--batch-size", str(examples)]
        _run(out, "bagpipe", "plan", *model, "--save-operators", str(out))
    return OperatorGraph.from_json(out.read_text(encoding="utf-8"), source=str(out))


def _job(case: Case, folder: Path) -> float:
    """The median step of the trainer in seconds."""
    out = folder / "result.json"
    with ShapedServer(case.rate) as server:
        flags = [*_data_flags(folder), "--data.batch_size", str(case.batch_examples), "--data.eval_fraction", "0"]
        flags += ["--cache.rows", str(case.cache_rows // case.ranks), "--oracle.lookahead", str(_LOOKAHEAD)]
        flags += ["--store.url", server.url, "--model.name", case.model, "--model.embedding_dim", str(_DIM)]
        flags += ["--model.bottom_mlp", _BOTTOM_MLP, "--model.top_mlp", case.top_mlp, "--result", str(out)]
        if case.stages > 1:
            flags += ["--pipeline.schedule", case.schedule, "--pipeline.stages", str(case.stages)]
            flags += ["--pipeline.microbatches", str(case.microbatches)]
        ranks = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
        return float(_run(out, *(ranks if case.ranks > 1 else []), "trainer", *flags)["step_s_p50"])


def _data_flags(folder: Path) -> Sequence[str]:
    return ["--data.path", str(folder / _LOG)]


def _run(out: Path, *words: str) -> Any:
    """The JSON that one of our programs writes."""
    return run_child([sys.executable, "-m", *words], out, name=" ".join(words[:2]), timeout_s=_TIMEOUT_S)


def tables(values: Values) -> str:
    """Forecast against measured step, per case."""
    rows, near = [], 0
    for record in found_of(values, "jobs") or []:
        measured = statistics.median(record["measured_s"])
        ratio = record["forecast_s"] / measured
        near += abs(ratio - 1) <= 0.15
        spread = f"{min(record['measured_s']) * 1e3:.2f} to {max(record['measured_s']) * 1e3:.2f}"
        cells = (f"{record['forecast_s'] * 1e3:.2f}", f"{measured * 1e3:.2f} ({spread})", f"{ratio:.2f}")
        rows.append((record["case"], *cells, record["limit"]))
    headers = ("case", "forecast ms", "measured ms", "forecast / measured", "limit of the forecast")
    return table(headers, rows) + f"\nWithin 15 %: {near} of {len(rows)}.\n"


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose names have this text")
    parser.add_argument("--cases", type=int, default=0, help="only the first so many; 0: all")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    rehearsal={"examples": 40_000, "repeats": 1, "cases": 1},
    packages=(*TRAINING_PACKAGES, "redis"),
    machine=store_server,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
