"""`make_plan`: chooses stages, schedule and micro-batches for devices, and compares with the alternatives.

    for replicas d, micro-batches M: find ──layouts──> estimate ──the best few──> predict ──least step_s──> Plan
                                     ChainSearch ──> gpipe, 1f1b, eager-1f1b  ┐
                                     one stage: one device, or all as replicas ┴──> alternatives

The search minimises the bottleneck, the slowest stage's time per example. A step also fills and drains the pipeline, so
the layouts that the search visited are compared by simulation. The plan has the least step time, and reports the least
bottleneck.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bagpipe.errors import InputError
from bagpipe.partition.bisect import Layout, least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.operators import OperatorGraph
from bagpipe.partition.planner import Found
from bagpipe.partition.predict import Prediction, cover, micro_seconds, predict, stage_graph, stage_ranks
from bagpipe.partition.result import Alternative, Partition, Plan, StagePlan
from bagpipe.partition.search import find
from bagpipe.schedule.analysis.cover import check_cover

__all__ = ["LINEAR_SCHEDULES", "Replicas", "make_plan"]

#: Replication of stages: none; the same for all, which ``torchrun … -m trainer`` runs; individual.
Replicas = Literal["none", "same", "each"]

#: Schedules of chains that a plan is compared with, one stage per rank. On a stage graph they keep more in flight than
#: `graph`, which hides slow links.
LINEAR_SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")

#: Layouts with the best estimates that are simulated, per kind.
_SIMULATED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    layout: Layout
    bottleneck_s: float
    schedule: str = "graph"
    relay: bool = False


def make_plan(
    graph: OperatorGraph,
    cluster: Cluster,
    batch_examples: int,
    *,
    microbatches: int | None = None,
    replicas: Replicas = "same",
    mixed_sizes: bool = False,
    on_search: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Choose stages, micro-batches and replicas.

    Args:
        graph: the operators.
        cluster: the devices.
        batch_examples: examples per batch, over all replicas.
        microbatches: per batch; None: try powers of two.
        replicas: see `Replicas`.
        mixed_sizes: stages of a partition can differ in micro-batches, in the exact search only.
        on_search: called after each search with the number of those done and of all.

    Raises:
        InputError: nothing fits the memory, or there are more micro-batches than examples.
    """
    model = CostModel(graph, cluster, batch_examples)
    if microbatches is not None and not 1 <= microbatches <= batch_examples:
        raise InputError(f"microbatches must be 1 to {batch_examples}, the examples of a batch, got {microbatches}")
    counts = _counts(batch_examples, cluster.devices) if microbatches is None else [microbatches]
    choices = _replica_choices(replicas, cluster.devices)
    groups = [(count,) for count in counts] + ([tuple(counts)] if mixed_sizes and len(counts) > 1 else [])
    searches = len(choices) * (len(groups) + len(counts))
    done = itertools.count(1)
    found: list[Found] = []
    chains: list[_Candidate] = []
    for allowed, group in itertools.product(choices, groups):
        found += [each for each in [find(model, allowed, group)] if each is not None]
        on_search(next(done), searches)
    for allowed, count in itertools.product(choices, counts):
        chains += _chain(model, count, allowed)
        on_search(next(done), searches)
    best = _least_step(model, _candidates(model, found, chains)) if found else None
    if best is None:
        raise InputError(_does_not_fit(model, counts, replicas))
    one_device = _whole(model, 1, counts)
    data_parallel = _data_parallel(model, counts, choices)
    for whole in (data_parallel, one_device):  # the searches can miss them, since they minimise bottlenecks
        if whole is not None and whole.step_s <= best.step_s:
            best = whole
    return Plan(
        partition=best,
        least_bottleneck_s=min(each.bottleneck_s for each in found),
        least_chain_bottleneck_s=min((chain.bottleneck_s for chain in chains), default=None),
        exact=all(each.exact for each in found),
        one_device=one_device,
        alternatives=tuple(_alternatives(model, data_parallel, chains)),
    )


def _counts(batch_examples: int, devices: int) -> list[int]:
    """Powers of two up to the batch size and to four times the devices (at least 16)."""
    most = min(batch_examples, max(16, 4 * devices))
    return [1 << bits for bits in range(most.bit_length())]


def _replica_choices(replicas: Replicas, devices: int) -> list[tuple[int, ...]]:
    """Sets of replica counts; a partition uses the counts of one set."""
    if replicas == "each":
        # Without replicas the search differs, and often finds shallower layouts.
        return [tuple(range(1, devices + 1)), (1,)][:devices]
    if replicas == "none":
        return [(1,)]
    return [(count,) for count in range(1, devices + 1) if devices % count == 0]


def _candidates(model: CostModel, found: Sequence[Found], chains: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Layouts to simulate: the best estimates, the least bottleneck, the best chains without relays."""
    estimates = {layout: _estimate(model, layout) for each in found for layout in each.layouts}
    in_order = sorted(estimates, key=lambda layout: estimates[layout])
    # One per search as well, since the best estimates overall are often similar.
    first = sorted((min(each.layouts, key=lambda x: estimates[x]) for each in found), key=lambda x: estimates[x])
    likely = [*in_order[:_SIMULATED], *first[:_SIMULATED], min(estimates, key=model.bottleneck)]
    linear = _promising(model, [chain.layout for chain in chains])
    for layout in dict.fromkeys([*likely, *linear]):
        equal = len({stage.microbatches for stage in layout}) == 1
        schedules = LINEAR_SCHEDULES if layout in linear else ("gpipe", "eager-1f1b")
        for schedule in ("graph", *(schedules if equal and len(layout) > 1 else ())):
            yield _Candidate(layout=layout, bottleneck_s=model.bottleneck(layout), schedule=schedule)


def _promising(model: CostModel, layouts: Iterable[Layout]) -> list[Layout]:
    return sorted(layouts, key=lambda layout: _estimate(model, layout))[:_SIMULATED]


def _estimate(model: CostModel, layout: Layout) -> float:
    """Step time if all stages were the slowest: (M + depth - 1) micro-batches, plus delays of the hops."""
    smallest = model.batch_examples / max(stage.microbatches for stage in layout)
    fill = max(model.in_flight(layout)) - smallest  # examples before the last stage begins
    busiest = max(model.totals(stage.mask).transfer_bytes / stage.replicas for stage in layout)
    hop_s = model.cluster.network.latency_s + smallest * busiest / model.rank_bandwidth_bytes_per_s
    return model.bottleneck(layout) * (model.batch_examples + fill) + 2 * fill / smallest * hop_s


def _chain(model: CostModel, count: int, allowed: tuple[int, ...]) -> Iterator[_Candidate]:
    """The best PipeDream chain, if one fits."""
    search = ChainSearch(model, allowed, count)
    layout = least_bottleneck(search.bottleneck, search.solve)
    if layout is not None:
        yield _Candidate(layout=layout, bottleneck_s=search.bottleneck(layout), relay=True)


def _data_parallel(model: CostModel, counts: Sequence[int], choices: Sequence[tuple[int, ...]]) -> Partition | None:
    """The whole model on every device, if that is allowed and fits."""
    devices = model.cluster.devices
    allowed = devices > 1 and any(devices in replicas for replicas in choices)
    return _whole(model, devices, counts) if allowed else None


def _alternatives(
    model: CostModel, data_parallel: Partition | None, chains: Sequence[_Candidate]
) -> Iterator[Alternative]:
    if data_parallel is not None:
        yield Alternative(name="data parallel", partition=data_parallel)
    promising = _promising(model, [chain.layout for chain in chains])
    for schedule in LINEAR_SCHEDULES:
        linear = [
            _Candidate(layout=chain.layout, bottleneck_s=chain.bottleneck_s, schedule=schedule, relay=True)
            for chain in chains
            if chain.layout in promising
        ]
        best = _least_step(model, linear)
        if best is not None:
            yield Alternative(name=f"chain, {schedule}", partition=best)


def _whole(model: CostModel, replicas: int, counts: Sequence[int]) -> Partition | None:
    """The model as one stage."""
    layouts = [(Placed(model.graph.everything, replicas, count),) for count in counts]
    return _least_step(model, [_Candidate(layout=x, bottleneck_s=model.bottleneck(x)) for x in layouts])


def _least_step(model: CostModel, candidates: Iterable[_Candidate]) -> Partition | None:
    """The candidate with the least step time among those that fit."""
    best: tuple[_Candidate, Prediction] | None = None
    for candidate in candidates:
        predicted = predict(model, candidate.layout, candidate.schedule, relay=candidate.relay)
        if predicted.fits and (best is None or predicted.step_s < best[1].step_s):
            best = candidate, predicted
    return None if best is None else _partition(model, *best)


def _partition(model: CostModel, candidate: _Candidate, predicted: Prediction) -> Partition:
    if not candidate.relay:
        check_cover(cover(model, candidate.layout))
    stages = []
    parts = zip(candidate.layout, stage_ranks(candidate.layout), predicted.in_flight, strict=True)
    for stage, ranks, in_flight in parts:
        totals = model.totals(stage.mask)
        forward_s, backward_s = micro_seconds(model, stage, ranks)
        examples = -(in_flight * model.batch_examples // -stage.microbatches)
        stages.append(
            StagePlan(
                operators=model.graph.names(stage.mask),
                replicas=stage.replicas,
                microbatches=stage.microbatches,
                in_flight=in_flight,
                forward_s=forward_s,
                backward_s=backward_s,
                time_per_example_s=model.time_per_example(totals, stage.replicas, stage.microbatches),
                memory_bytes=model.memory_bytes(totals, stage.replicas, examples),
            )
        )
    return Partition(
        stages=tuple(stages),
        graph=stage_graph(model, candidate.layout, relay=candidate.relay),
        schedule=candidate.schedule,
        bottleneck_s=candidate.bottleneck_s,
        step_s=predicted.step_s,
        bubble=predicted.bubble,
    )


def _does_not_fit(model: CostModel, counts: Sequence[int], replicas: Replicas) -> str:
    examples = -(model.batch_examples // -max(counts))
    needs = {
        operator.name: model.memory_bytes(model.totals(1 << n), 1, examples)
        for n, operator in enumerate(model.graph.operators)
    }
    largest = max(needs, key=lambda name: needs[name])
    return (
        f"no partition over {model.cluster.devices} devices with replicas={replicas} fits "
        f"{model.cluster.memory_bytes:.4g} bytes each; operator {largest!r} alone needs {needs[largest]:.4g} with "
        f"{examples} examples in flight"
    )
