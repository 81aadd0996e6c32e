"""How long does the partitioner search, and how much better than a chain is what it finds?

    python -m benchmarks.partition.main [--branches 2 4 8 16] [--devices 32] [--json FILE]

The models are like those of GraphPipe's evaluation (Jeon et al., ASPLOS 2025): branches of 8 layers 4096 wide, a join
and a layer behind it. Costs are computed, not measured: operations of a layer over a device's speed. Times are CPU
times of the one thread. What is compared is what the cost model says; nothing is trained here.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bagpipe.partition.bisect import least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.partition.plan import Replicas, make_plan
from bagpipe.partition.search import find

T = TypeVar("T")

LAYERS = 8
WIDTH = 4096
BATCH_EXAMPLES = 16384
MICROBATCHES = 64

#: Operations of one layer's forward per example; its backward has twice as many.
LAYER_FLOP = 2 * WIDTH * WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device does per second, and how it is linked."""

    name: str
    flop_per_s: float
    call_s: float
    memory_bytes: float
    bandwidth_bytes_per_s: float
    latency_s: float = 1e-5


#: Summit's V100 in fp32, as in GraphPipe; the same behind a slower network; a device six times as fast.
DEVICES = (
    Device(name="V100", flop_per_s=14e12, call_s=3e-5, memory_bytes=16e9, bandwidth_bytes_per_s=12.5e9),
    Device(name="V100, 25 Gb/s", flop_per_s=14e12, call_s=3e-5, memory_bytes=16e9, bandwidth_bytes_per_s=3.1e9),
    Device(name="A100", flop_per_s=80e12, call_s=2e-5, memory_bytes=40e9, bandwidth_bytes_per_s=25e9),
)


def towers(branches: int, device: Device, join: str, seed: int | None) -> OperatorGraph:
    """Branches of layers, a join, a layer; with a seed a branch's layer has 0.5 to 1.5 of a layer's work.

    ``concat`` makes the last layer as many times wider as there are branches, so that it is most of the bottleneck;
    ``sum`` leaves it as it is.
    """
    rng = random.Random(seed)
    operators, edges = [], []
    for branch in range(branches):
        for layer in range(LAYERS):
            operators.append(_layer(f"{branch}.{layer}", device, 1.0 if seed is None else rng.uniform(0.5, 1.5), 1))
            if layer:
                edges.append((f"{branch}.{layer - 1}", f"{branch}.{layer}"))
        edges.append((f"{branch}.{LAYERS - 1}", "join"))
    width = branches if join == "concat" else 1
    joined = Operator(
        name="join",
        forward=Cost(fixed_s=device.call_s),
        backward=Cost(fixed_s=device.call_s),
        output_bytes=4 * WIDTH * width,
    )
    post = _layer("post", device, 1.0, width)
    return OperatorGraph(operators=(*operators, joined, post), edges=(*edges, ("join", "post")))


def _layer(name: str, device: Device, work: float, inputs: int) -> Operator:
    forward_s = work * inputs * LAYER_FLOP / device.flop_per_s
    return Operator(
        name=name,
        forward=Cost(fixed_s=device.call_s, per_example_s=forward_s),
        backward=Cost(fixed_s=2 * device.call_s, per_example_s=2 * forward_s),
        param_bytes=4 * inputs * WIDTH * WIDTH,
        activation_bytes=2 * 4 * WIDTH,
        output_bytes=4 * WIDTH,
    )


def timed(repeats: int, work: Callable[[], T]) -> tuple[float, T]:
    """Median CPU seconds, and the last result."""
    seconds = []
    while True:
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
        if len(seconds) == repeats:
            return statistics.median(seconds), result


def measure(
    branches: int, device: Device, join: str, replicas: Replicas, seed: int | None, num_devices: int, repeats: int
) -> dict[str, Any]:
    """One row: search time at one micro-batch count, and the whole plan against the best chain."""
    graph = towers(branches, device, join, seed)
    cluster = Cluster(
        devices=num_devices,
        memory_bytes=device.memory_bytes,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        latency_s=device.latency_s,
    )
    allowed = range(1, num_devices + 1) if replicas == "each" else (1,)
    search_s, found = timed(repeats, lambda: find(CostModel(graph, cluster, BATCH_EXAMPLES), allowed, (MICROBATCHES,)))
    chain = ChainSearch(CostModel(graph, cluster, BATCH_EXAMPLES), allowed, MICROBATCHES)
    layout = least_bottleneck(chain.bottleneck, chain.solve)
    plan_s, plan = timed(1, lambda: make_plan(graph, cluster, BATCH_EXAMPLES, replicas=replicas))
    chains = {a.name: a.partition.step_s for a in plan.alternatives if a.name.startswith("chain")}
    best = plan.partition

    def ratio(other: float | None, own: float) -> float | None:
        return None if other is None else round(other / own, 3)

    return {
        "branches": branches,
        "device": device.name,
        "join": join,
        "replicas": replicas,
        "costs": "equal" if seed is None else "random",
        "search_s": round(search_s, 2),
        "plan_s": round(plan_s, 2),
        "bottleneck_ratio_64": None
        if found is None
        else ratio(None if layout is None else chain.bottleneck(layout), found.bottleneck_s),
        "bottleneck_ratio": ratio(plan.least_chain_bottleneck_s, plan.least_bottleneck_s),
        "step_ratio_1f1b": ratio(chains.get("chain, 1f1b"), best.step_s),
        "step_ratio_best_chain": ratio(min(chains.values(), default=None), best.step_s),
        "schedule": best.schedule,
        "stages": len(best.stages),
        "depth": max(best.graph.depths),
        "devices_used": best.devices,
        "microbatches": best.stages[0].microbatches,
        "step_ms": round(best.step_s * 1e3, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there")
    flags = parser.parse_args(argv)
    settings = [
        (branches, device, join, replicas, seed)
        for branches in flags.branches
        for join in ("sum", "concat")
        for device in DEVICES
        for replicas in ("none", "each")
        for seed in (None, 1)
        if branches == max(flags.branches) or (seed is None and device is not DEVICES[1] and join == "sum")
    ]
    rows: list[dict[str, Any]] = []
    kinds: dict[str, Replicas] = {"none": "none", "each": "each"}
    for branches, device, join, replicas, seed in settings:
        row = measure(branches, device, join, kinds[replicas], seed, flags.devices, flags.repeats)
        if not rows:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        rows.append(row)
        print("| " + " | ".join("–" if value is None else str(value) for value in row.values()) + " |", flush=True)
    if flags.json:
        environment = {"machine": platform.platform(), "python": platform.python_version(), "numpy": np.__version__}
        settings_used = {"devices": flags.devices, "batch_examples": BATCH_EXAMPLES, "repeats": flags.repeats}
        flags.json.write_text(
            json.dumps({"environment": environment, "settings": settings_used, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
