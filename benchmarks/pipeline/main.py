"""Does our runner cost more than PyTorch's for the same pipeline, and does the simulator predict a step's time?

    python -m benchmarks.pipeline.main [--rounds 15] [--only WORKLOAD] [--json FILE]

Two processes of one thread each over gloo. See README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from benchmarks.pipeline.contest import SCHEDULES, contest
from benchmarks.pipeline.forecast import forecast
from benchmarks.pipeline.workload import NUM_STAGES, Workload

#: Small: what an action costs matters. Large: what it computes does.
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
    """One workload and schedule at rank 0.

    Attributes:
        workload, schedule: which.
        torch_ms, ours_ms: median over the rounds of a round's time per step.
        ratio: median over the rounds of ours over theirs.
        ratio_low, ratio_high: its quartiles.
        forecast_ms: median over the rounds of what the simulator says.
        error: forecast over ours, minus 1.
        is_equal: both give the same gradients, bit by bit.
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


def measure(membership: Membership, names: list[str], rounds: int) -> list[Result]:
    """All workloads and schedules at this rank."""
    torch.set_num_threads(1)
    results = []
    with TorchPeers(membership, timeout_s=60) as peers:
        links = peers.open_links(NUM_STAGES)
        for name in names:
            for schedule in SCHEDULES:
                workload = WORKLOADS[name]
                foretold = [forecast(peers, links, workload, schedule) for _ in range(3)]
                times, is_equal = contest(peers, links, workload, schedule, rounds=rounds)
                foretold += [forecast(peers, links, workload, schedule) for _ in range(2)]
                ratios = sorted(ours / theirs for ours, theirs in zip(times.ours, times.torch, strict=True))
                results.append(
                    Result(
                        workload=name,
                        schedule=schedule,
                        torch_ms=median(times.torch) * 1e3,
                        ours_ms=median(times.ours) * 1e3,
                        ratio=median(ratios),
                        ratio_low=ratios[len(ratios) // 4],
                        ratio_high=ratios[-1 - len(ratios) // 4],
                        forecast_ms=median(foretold) * 1e3,
                        error=median(foretold) / median(times.ours) - 1,
                        is_equal=all(peers.gather(is_equal)),
                    )
                )
    return results


def _rank(pipe: Connection, membership: Membership, arguments: tuple[Any, ...]) -> None:
    pipe.send(measure(membership, *arguments))


def run(*arguments: Any) -> list[Result]:
    """`measure` in both processes; rank 0's results.

    Raises:
        EOFError: a process failed; it has said why.
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


def print_table(results: list[Result]) -> None:
    """Markdown, and whether the targets are met."""
    print("| workload | schedule | torch ms | ours ms | ours / torch (quartiles) | forecast ms | off by | same bits |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.workload} | {r.schedule} | {r.torch_ms:.2f} | {r.ours_ms:.2f} | {r.ratio:.3f} "
            f"({r.ratio_low:.3f} to {r.ratio_high:.3f}) | {r.forecast_ms:.2f} | {r.error:+.1%} "
            f"| {'yes' if r.is_equal else 'NO'} |"
        )
    ratio, error = max(r.ratio for r in results), max(abs(r.error) for r in results)
    print(
        f"\nRatio, at most {TARGET_RATIO}: {'met' if ratio <= TARGET_RATIO else 'missed'}, at worst {ratio:.3f}. "
        f"Forecast, within {TARGET_ERROR:.0%}: {'met' if error <= TARGET_ERROR else 'missed'}, at worst {error:.1%}."
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=sorted(WORKLOADS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = run([options.only] if options.only else list(WORKLOADS), options.rounds)
    print_table(results)
    if options.json:
        document = {
            "software": {"python": platform.python_version(), "torch": torch.__version__},
            "rounds": options.rounds,
            "workloads": {name: asdict(workload) for name, workload in WORKLOADS.items()},
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
