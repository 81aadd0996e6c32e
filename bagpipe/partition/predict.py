"""Predicted step time of a layout: the schedule's program simulated with stage costs and link delays.

layout ──stage_graph──> StageGraph ──schedule──> Program ──simulate──> step_s, in flight per stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bagpipe.errors import ScheduleError
from bagpipe.partition.bisect import Layout
from bagpipe.partition.chain import live_bytes
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.operators import members
from bagpipe.partition.splits import SplitModel, Work, is_batch
from bagpipe.schedule.analysis.cover import Cover
from bagpipe.schedule.analysis.memory import Memory, peak_bytes
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.lowering.recompute import add_recompute, shares_within
from bagpipe.schedule.registry import DENSE_SCHEDULES

__all__ = ["Prediction", "cover", "edge_bytes", "micro_seconds", "predict", "stage_graph", "stage_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulation of a step.

    Attributes:
        step_s: seconds of one batch, with the all-reduce over replicas.
        bubble: as `Simulation.bubble`.
        in_flight: per stage, peak number of micro-batches whose backward is not done.
        memory_bytes: per stage, of each device.
        recompute: per stage, the share of its micro-batches whose activations are recomputed.
        fits: the stages fit the memory.
    """

    step_s: float
    bubble: float
    in_flight: tuple[int, ...]
    memory_bytes: tuple[float, ...]
    recompute: tuple[float, ...]
    fits: bool


def edge_bytes(model: CostModel, layout: Sequence[Placed], *, relay: bool = False) -> dict[tuple[int, int], float]:
    """(producing stage, consuming stage) -> bytes per example.

    Args:
        model: the cost model.
        layout: stages in topological order.
        relay: a chain: only adjacent stages are connected, and relay what later stages need.
    """
    graph = model.graph
    if relay:
        order = [n for stage in layout for n in graph.order if stage.mask >> n & 1]
        live, position, found = live_bytes(model, order), 0, {}
        for number, stage in enumerate(layout[:-1]):
            position += stage.mask.bit_count()
            found[number, number + 1] = live[position]
        return found
    found = {}
    for number, stage in enumerate(layout):
        for later in range(number + 1, len(layout)):
            crossing = [n for n in members(stage.mask) if graph.consumers[n] & layout[later].mask]
            if crossing:
                found[number, later] = math.fsum(graph.operators[n].output_bytes for n in crossing)
    return found


def stage_graph(model: CostModel, layout: Sequence[Placed], *, relay: bool = False) -> StageGraph:
    """The stage graph. A stage is named after its first operator and the number of others."""
    names = [model.graph.names(stage.mask) for stage in layout]
    return StageGraph(
        micro_per_batch=tuple(stage.microbatches for stage in layout),
        edges=tuple(sorted(edge_bytes(model, layout, relay=relay))),
        names=tuple(own[0] if len(own) == 1 else f"{own[0]} +{len(own) - 1}" for own in names),
    )


def cover(model: CostModel, layout: Sequence[Placed]) -> Cover:
    """Operators and devices of each stage, for `check_cover`; without relays."""
    return Cover(
        graph=stage_graph(model, layout),
        operators=tuple(frozenset(members(stage.mask)) for stage in layout),
        num_operators=model.graph.size,
        operator_edges=tuple((src, dst) for src, mask in enumerate(model.graph.consumers) for dst in members(mask)),
        devices=tuple(map(frozenset, stage_ranks(layout))),
    )


def stage_ranks(layout: Sequence[Placed]) -> list[range]:
    """The ranks of each stage: 0, 1, … in the order of the stages."""
    ends = list(accumulate((stage.replicas for stage in layout), initial=0))
    return [range(begin, end) for begin, end in pairwise(ends)]


def micro_seconds(model: CostModel, stage: Placed, ranks: Sequence[int]) -> tuple[float, float]:
    """Seconds of a stage's forward and backward of one micro-batch, with collectives inside; on its slowest rank."""
    if not is_batch(stage.splits):
        work = SplitModel(model, stage.replicas, stage.microbatches, ranks).stage(stage.mask, stage.splits)
        return work.forward_s, work.backward_s
    examples = model.batch_examples / stage.microbatches / stage.replicas
    own = [model.graph.operators[n] for n in members(stage.mask)]
    speed = model.cluster.speed(ranks)
    forward_s, backward_s = (math.fsum(getattr(op, way).at(examples) for op in own) for way in ("forward", "backward"))
    return forward_s / speed, backward_s / speed


def _action_seconds(forward_s: float, backward_s: float) -> dict[str, float]:
    """Seconds of a stage's actions. A linear layer's two gradients take as many multiplications as each other."""
    half_s = backward_s / 2
    return {"F": forward_s, "REC": forward_s, "B": backward_s, "I": half_s, "W": half_s}


def predict(model: CostModel, layout: Layout, schedule: str = "graph", *, relay: bool = False) -> Prediction:
    """Simulate one batch.

    Args:
        model: the cost model.
        layout: stages in topological order, one device (with replicas) each.
        schedule: name of a dense schedule with one stage per rank.
        relay: see `edge_bytes`.

    Raises:
        ScheduleError: the schedule does not allow these stages or micro-batches.
    """
    sizes = edge_bytes(model, layout, relay=relay)
    graph = StageGraph(micro_per_batch=tuple(s.microbatches for s in layout), edges=tuple(sorted(sizes)))
    ranks = stage_ranks(layout)
    seconds = [_action_seconds(*micro_seconds(model, *each)) for each in zip(layout, ranks, strict=True)]
    delays = _delays(model, layout, sizes)

    def latency(source: Action, target: Action) -> float:
        pair = (source.stage, target.stage) if source.op == "F" else (target.stage, source.stage)
        return delays[pair]

    program = DENSE_SCHEDULES[schedule].build(graph)
    shares = _least_shares(model, layout, program) if model.recompute else {}
    if any(shares.values()):
        program = add_recompute(program, shares)
    done = simulate(program, lambda action: seconds[action.stage][action.op], latency=latency)
    finish = [0.0] * len(layout)
    for timed in done.timed:
        for atom in timed.action.atoms:
            finish[atom.stage] = max(finish[atom.stage], timed.finish)
    works = [_held(model, stage) for stage in layout]
    network = model.cluster.network
    step_s = max(
        end + network.all_reduce_s(own.synced_bytes, on) for end, own, on in zip(finish, works, ranks, strict=True)
    )
    in_flight = [done.lanes[f"rank{number}"].peak_in_flight for number in range(len(layout))]
    if any(shares.values()):
        activations = _activations(model, layout)
        kept = [peak_bytes(program.lanes[f"rank{number}"], activations) for number in range(len(layout))]
    else:
        examples = [
            -(live * model.batch_examples // -s.microbatches) for live, s in zip(in_flight, layout, strict=True)
        ]
        kept = [count * own.activation_bytes for count, own in zip(examples, works, strict=True)]
    memory = [_weight_bytes(model, own) + live for own, live in zip(works, kept, strict=True)]
    return Prediction(
        step_s=step_s,
        bubble=done.bubble,
        in_flight=tuple(in_flight),
        memory_bytes=tuple(memory),
        recompute=tuple(shares.get(number, 0.0) for number in range(len(layout))),
        fits=all(each <= model.cluster.memory_bytes for each in memory),
    )


def _held(model: CostModel, stage: Placed) -> Work:
    """What a stage keeps and synchronises, without its seconds."""
    if not is_batch(stage.splits):
        return SplitModel(model, stage.replicas, stage.microbatches).stage(stage.mask, stage.splits)
    totals = model.totals(stage.mask)
    return Work(
        synced_bytes=totals.param_bytes,
        weight_bytes=totals.param_bytes,
        activation_bytes=totals.activation_bytes / stage.replicas,
    )


def _weight_bytes(model: CostModel, work: Work) -> float:
    return model.cluster.weight_copies * work.weight_bytes


def _activations(model: CostModel, layout: Layout, scale: Sequence[float] | None = None) -> Memory:
    """Bytes of a micro-batch on one replica, per stage; times `scale`."""
    activations, inputs = {}, {}
    for number, stage in enumerate(layout):
        totals = model.totals(stage.mask)
        examples = -(model.batch_examples // -stage.microbatches) / stage.replicas
        share = examples * (1.0 if scale is None else scale[number])
        activations[number] = share * totals.activation_bytes
        inputs[number] = share * min(totals.input_bytes, totals.activation_bytes)
    return Memory(activation_bytes=activations, input_bytes=inputs)


def _least_shares(model: CostModel, layout: Layout, program: Program) -> dict[int, float]:
    """Per stage the least share of recomputed micro-batches with which it fits its device; empty if one never fits."""
    free = [model.cluster.memory_bytes - _weight_bytes(model, _held(model, stage)) for stage in layout]
    if any(left <= 0 for left in free):
        return {}
    try:
        return shares_within(program, _activations(model, layout, [1 / left for left in free]), 1.0)
    except ScheduleError:
        return {}


def _delays(
    model: CostModel, layout: Sequence[Placed], sizes: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Seconds of a message per edge: one micro-batch of the stage with fewer micro-batches."""
    ranks, delays = stage_ranks(layout), {}
    for (producer, consumer), size in sizes.items():
        examples = model.batch_examples / min(layout[producer].microbatches, layout[consumer].microbatches)
        delays[producer, consumer] = model.cluster.network.split_batch_s(
            size * examples, ranks[producer], ranks[consumer]
        )
    return delays
