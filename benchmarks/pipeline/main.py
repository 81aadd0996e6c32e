"""Does our runner cost more than PyTorch's for the same pipeline, and does the simulator predict a step's time?

    python -m benchmarks.pipeline.main [--rounds 15] [--only WORKLOAD] [--out DIR]

Two processes of one thread each over gloo. See README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.report import table, verdict
from benchmarks.harness.rounds import paired_ratios
from benchmarks.pipeline.forecast import forecast
from benchmarks.pipeline.runners import SCHEDULES, contest
from benchmarks.pipeline.workload import NUM_STAGES, Workload

#: The overhead of an action dominates in `small`, its computation in `large`.
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="small", width=128, layers=3, examples=512, microbatches=8, steps=40),
        Workload(name="large", width=256, layers=4, examples=2048, microbatches=8, steps=10),
    )
}
TARGET_RATIO, TARGET_ERROR = 1.05, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one workload and schedule at rank 0.

    Attributes:
        workload, schedule: names.
        torch_ms, ours_ms: time per step, median over the rounds.
        ratio, ratio_low, ratio_high: median and quartiles over the rounds of our time over torch's.
        forecast_ms: median of the simulated times.
        error: forecast over ours, minus 1.
        is_equal: whether both give bit-identical gradients.
    """

    workload: str
    schedule: str
    torch_ms: float
    ours_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    forecast_ms: float
    error: float
    is_equal: bool


def measure(membership: Membership, names: Sequence[str], rounds: int) -> list[Result]:
    """Results of all workloads and schedules at this rank."""
    torch.set_num_threads(1)
    results = []
    with TorchPeers(membership, timeout_s=60) as peers:
        links = peers.open_links(NUM_STAGES)
        for name in names:
            for schedule in SCHEDULES:
                workload = WORKLOADS[name]
                forecasts = [forecast(peers, links, workload, schedule) for _ in range(3)]
                times, is_equal = contest(peers, links, workload, schedule, rounds=rounds)
                forecasts += [forecast(peers, links, workload, schedule) for _ in range(2)]
                ratios = paired_ratios(times["ours"], times["torch"])
                results.append(
                    Result(
                        workload=name,
                        schedule=schedule,
                        torch_ms=median(times["torch"]) * 1e3,
                        ours_ms=median(times["ours"]) * 1e3,
                        ratio=ratios.median,
                        ratio_low=ratios.low_quartile,
                        ratio_high=ratios.high_quartile,
                        forecast_ms=median(forecasts) * 1e3,
                        error=median(forecasts) / median(times["ours"]) - 1,
                        is_equal=all(peers.gather(is_equal)),
                    )
                )
    return results


def _rank(pipe: Connection, membership: Membership, arguments: tuple[Any, ...]) -> None:
    pipe.send(measure(membership, *arguments))


def run(*arguments: Any) -> list[Result]:
    """Run `measure` in both processes, and return rank 0's results.

    Raises:
        EOFError: a process failed and has printed its traceback.
    """
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_STAGES)]
    processes = [
        context.Process(
            target=_rank,
            args=(
                child,
                Membership(
                    rank=rank,
                    world_size=NUM_STAGES,
                    local_rank=rank,
                    local_world_size=NUM_STAGES,
                    port=store.port,
                    store_is_launchers=True,
                ),
                arguments,
            ),
        )
        for rank, (_, child) in enumerate(pipes)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        child.close()
    results: list[list[Result]] = [parent.recv() for parent, _ in pipes]
    for process in processes:
        process.join()
    return results[0]


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    names = [options.only] if options.only else list(WORKLOADS)
    return {name: partial(_measure, name, options.rounds) for name in names}


def _measure(name: str, rounds: int, part: Part) -> None:
    part.keep([asdict(result) for result in run([name], rounds)])


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(WORKLOADS))


def _tables(values: Values) -> str:
    """One row per workload and schedule, and whether the targets are met."""
    results = [Result(**record) for part in values["parts"].values() for record in part.get("found") or []]
    if not results:
        return ""
    headers = ("workload", "schedule", "torch ms", "ours ms", "ours / torch (quartiles)", "forecast ms", "off by")
    rows = [
        (
            r.workload,
            r.schedule,
            f"{r.torch_ms:.2f}",
            f"{r.ours_ms:.2f}",
            f"{r.ratio:.3f} ({r.ratio_low:.3f} to {r.ratio_high:.3f})",
            f"{r.forecast_ms:.2f}",
            f"{r.error:+.1%}",
            "yes" if r.is_equal else "NO",
        )
        for r in results
    ]
    ratio, error = max(r.ratio for r in results), max(abs(r.error) for r in results)
    return table((*headers, "same bits"), rows) + (
        f"\nRatio, at most {TARGET_RATIO}: {verdict(ratio, at_most=TARGET_RATIO)}, at worst {ratio:.3f}. "
        f"Forecast, within {TARGET_ERROR:.0%}: {verdict(error, at_most=TARGET_ERROR)}, at worst {error:.1%}.\n"
    )


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"rounds": 1, "only": "small"},
    packages=("torch",),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
