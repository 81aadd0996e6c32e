"""How long does the partitioner search, and how much better than a chain is the partition it finds?

    python -m benchmarks.partition.main [--branches 2 4 8 16] [--devices 32] [--out DIR]

The models resemble those of GraphPipe's evaluation (Jeon et al., ASPLOS 2025): branches of 8 layers 4096 wide, a join,
and one layer behind it. Costs are computed (operations of a layer over a device's speed), not measured. Times are CPU
times of the thread. The ratios compare predictions of the cost model; nothing is trained.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagpipe.cluster.network import Network
from bagpipe.partition.bisect import least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.partition.plan import Replicas, make_plan
from bagpipe.partition.search import find
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table
from benchmarks.harness.rounds import timed

LAYERS = 8
WIDTH = 4096
BATCH_EXAMPLES = 16384
MICROBATCHES = 64

REPLICAS: tuple[Replicas, ...] = ("none", "each")

#: Operations of one layer's forward pass per example; the backward pass has twice as many.
LAYER_FLOP = 2 * WIDTH * WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Speed and memory of a device, and its link to the others."""

    name: str
    flop_per_s: float
    call_s: float
    memory_bytes: float
    bandwidth_bytes_per_s: float
    latency_s: float = 1e-5


#: Summit's V100 in fp32, as in GraphPipe; the same behind a slower network; a device about six times as fast.
DEVICES = (
    Device(name="V100", flop_per_s=14e12, call_s=3e-5, memory_bytes=16e9, bandwidth_bytes_per_s=12.5e9),
    Device(name="V100, 25 Gb/s", flop_per_s=14e12, call_s=3e-5, memory_bytes=16e9, bandwidth_bytes_per_s=3.1e9),
    Device(name="A100", flop_per_s=80e12, call_s=2e-5, memory_bytes=40e9, bandwidth_bytes_per_s=25e9),
)


def towers(branches: int, device: Device, join: str, seed: int | None) -> OperatorGraph:
    """Branches of layers, a join, a layer. A seed scales the work of every branch layer by 0.5 to 1.5.

    ``concat`` multiplies the last layer's width by the number of branches, which makes it most of the bottleneck;
    ``sum`` keeps its width.
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


def measure(
    branches: int, device: Device, join: str, replicas: Replicas, seed: int | None, num_devices: int, repeats: int
) -> dict[str, Any]:
    """Search time at one number of micro-batches, and the whole plan against the best chain."""
    graph = towers(branches, device, join, seed)
    cluster = Cluster(
        devices=num_devices,
        memory_bytes=device.memory_bytes,
        network=Network(bandwidth_bytes_per_s=device.bandwidth_bytes_per_s, latency_s=device.latency_s),
    )
    allowed = range(1, num_devices + 1) if replicas == "each" else (1,)
    search_s, found = timed(
        lambda: find(CostModel(graph, cluster, BATCH_EXAMPLES), allowed, (MICROBATCHES,)),
        repeats,
        clock=time.process_time,
    )
    chain = ChainSearch(CostModel(graph, cluster, BATCH_EXAMPLES), allowed, MICROBATCHES)
    layout = least_bottleneck(chain.bottleneck, chain.solve)
    plan_s, plan = timed(lambda: make_plan(graph, cluster, BATCH_EXAMPLES, replicas=replicas), clock=time.process_time)
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


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    settings = [
        (branches, device, join, replicas, seed)
        for branches in options.branches
        for join in ("sum", "concat")
        for device in DEVICES
        for replicas in REPLICAS
        for seed in (None, 1)
        if branches == max(options.branches) or (seed is None and device is not DEVICES[1] and join == "sum")
    ]

    def search(part: Part) -> None:
        for branches, device, join, replicas, seed in settings[:2] if options.rehearse else settings:
            row = measure(branches, device, join, replicas, seed, options.devices, options.repeats)
            part.add(row)
            part.say(f"{branches} branches, {device.name}, {join}, {replicas}: {row['search_s']} s a search")

    return {"search": search}


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--branches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)


def _tables(values: Values) -> str:
    headers = ("branches", "device", "join", "replicas", "costs", "search s", "plan s", "bottleneck, M = 64")
    return table(
        (*headers, "bottleneck, best M", "step, chain 1f1b", "step, best chain", "plan"),
        map(_row, found_of(values, "search")),
    )


def _row(record: Mapping[str, Any]) -> tuple[object, ...]:
    settings = (record[name] for name in ("branches", "device", "join", "replicas", "costs"))
    seconds = (f"{record[name]:.1f}" for name in ("search_s", "plan_s"))
    names = ("bottleneck_ratio_64", "bottleneck_ratio", "step_ratio_1f1b", "step_ratio_best_chain")
    ratios = ("–" if record[name] is None else f"{record[name]:.2f}" for name in names)
    plan = (
        f"{record['schedule']}, {record['stages']} stages, depth {record['depth']}, "
        f"{record['devices_used']} devices, M = {record['microbatches']}"
    )
    return (*settings, *seconds, *ratios, plan)


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"branches": [2], "devices": 4, "repeats": 1},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
