"""Do reshardings over gloo take the time that the simulator says?

    python -m benchmarks.resharding.main [--rate 100mbit] [--rows 4096] [--rounds 5] [--out DIR]

Four ranks on hosts of their own, with shaped ports. Needs root, `ip` and `tc`. See README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torch._C._distributed_c10d import TCPStore

from bagpipe.errors import JobError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table, verdict
from benchmarks.harness.shaped_link import check_privileges
from benchmarks.resharding.cases import NUM_RANKS
from benchmarks.resharding.network import ShapedHosts

TARGET_ERROR = 0.2
_TIMEOUT_S = 1200


def run(rate: str, rows: int, rounds: int) -> Any:
    """What rank 0 has found.

    Raises:
        JobError: a rank failed.
    """
    with ShapedHosts(NUM_RANKS, rate) as hosts, tempfile.TemporaryDirectory() as folder:
        store = TCPStore(hosts.address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        outcome = Path(folder) / "outcome.json"
        processes = [
            subprocess.Popen(
                [
                    *hosts.inside(rank),
                    *(sys.executable, "-m", "benchmarks.resharding.rank", str(rank), hosts.address, str(store.port)),
                    *(str(rows), str(rounds), str(outcome)),
                ],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]
        try:
            errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            raise JobError(f"rank {failed[0]} ended with an error:\n{errors[failed[0]][-2000:]}")
        return json.loads(outcome.read_text(encoding="utf-8"))


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    check_privileges()
    return {"gloo": partial(_measure, options)}


def _measure(options: argparse.Namespace, part: Part) -> None:
    part.keep(run(options.rate, options.rows, options.rounds))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="100mbit", help="of a port, in each direction, as tc writes it")
    parser.add_argument("--rows", type=int, default=4096, help="examples of the tensor")
    parser.add_argument("--rounds", type=int, default=5)


def _tables(values: Values) -> str:
    """One row per pair of layouts, and whether the target is met."""
    found = found_of(values, "gloo")
    if not found:
        return ""
    by_case: dict[str, dict[str, Any]] = {}
    for record in found["times"]:
        by_case.setdefault(record["case"], {})[record["way"]] = record
    rows, errors = [], []
    for case, ways in by_case.items():
        cells = [case]
        for way in ("planned", "plain"):
            simulated_s, measured_s = ways[way]["simulated_s"], median(ways[way]["measured_s"])
            error = simulated_s / measured_s - 1
            errors.append((abs(error), way))
            cells += [f"{simulated_s * 1e3:.0f}", f"{measured_s * 1e3:.0f}", f"{error:+.1%}"]
        rows.append((*cells, f"{median(ways['plain']['measured_s']) / median(ways['planned']['measured_s']):.2f}"))
    headers = (
        "layouts",
        *(f"{way} {what}" for way in ("planned", "plain") for what in ("ms, simulated", "measured", "off by")),
    )
    network = found["network"]
    worst = {way: max(error for error, each in errors if each == way) for way in ("planned", "plain")}
    return table((*headers, "plain / planned"), rows) + (
        f"\nCalibrated: {network['bandwidth_bytes_per_s'] / 1e6:.2f} MB/s "
        f"(at the end {found['bandwidth_at_end'] / 1e6:.2f}), "
        f"{network['message_s'] * 1e6:.0f} µs per message, latency {network['latency_s'] * 1e6:.0f} µs. "
        f"Simulated within {TARGET_ERROR:.0%} of measured, planned: "
        f"{verdict(worst['planned'], at_most=TARGET_ERROR)}, at worst {worst['planned']:.1%}; plain: "
        f"{verdict(worst['plain'], at_most=TARGET_ERROR)}, at worst {worst['plain']:.1%}.\n"
    )


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"rounds": 1, "rows": 64},
    packages=("torch",),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
