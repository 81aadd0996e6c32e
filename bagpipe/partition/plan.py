"""`make_plan`: chooses stages, schedule and micro-batches for devices, and compares with the alternatives.

    for planner, replicas d, micro-batches M: Problem ──Found──> candidates ──simulate──> the shortest step ──> Plan
                                              one stage: one device, or all as replicas ──> alternatives

A planner minimises the bottleneck, the slowest stage's time per example, or an estimate of the step. A step also fills
and drains the pipeline, so the layouts that the planners visited are compared by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from bagpipe.errors import InputError
from bagpipe.partition.candidates import candidates, chain_candidates, fastest, whole
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.cuts import MOST_SETS, closed_sets
from bagpipe.partition.operators import OperatorGraph
from bagpipe.partition.planner import Found, Problem
from bagpipe.partition.planners import PLANNERS
from bagpipe.partition.result import Alternative, Partition, Plan
from bagpipe.schedule.registry import LINEAR_SCHEDULES

__all__ = ["AUTO", "Replicas", "make_plan"]

#: All planners; the plan is the best that any of them found.
AUTO = "auto"

#: Replication of stages: none; the same for all, which ``torchrun … -m trainer`` runs; individual.
Replicas = Literal["none", "same", "each"]


def make_plan(
    graph: OperatorGraph,
    cluster: Cluster,
    batch_examples: int,
    *,
    planner: str = AUTO,
    microbatches: int | None = None,
    replicas: Replicas = "same",
    mixed_sizes: bool = False,
    recompute: bool = False,
    intra_operator: bool = False,
    on_search: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Choose stages, micro-batches and replicas.

    Args:
        graph: the operators.
        cluster: the devices.
        batch_examples: examples per batch, over all replicas.
        planner: a name in `PLANNERS`, or `AUTO`. Chains of `pipedream` are searched in any case, to compare with.
        microbatches: per batch; None: try powers of two.
        replicas: see `Replicas`.
        mixed_sizes: stages of a partition can differ in micro-batches, in the exact search of graphpipe only.
        recompute: stages that do not fit may recompute activations, each the least share of its micro-batches.
        intra_operator: `alpa` also divides the operators of a stage in other ways than by examples.
        on_search: called after each search with the number of those done and of all.

    Raises:
        InputError: an unknown planner, one that cannot do what is asked, nothing fits the memory, or there are more
            micro-batches than examples.
    """
    if planner != AUTO and planner not in PLANNERS:
        raise InputError(f"planner must be one of {', '.join((AUTO, *PLANNERS))}, got {planner!r}")
    if intra_operator and (recompute or planner not in (AUTO, "alpa")):
        other = "recompute" if recompute else f"planner {planner}"
        raise InputError(f"intra_operator is possible with planner {AUTO} or alpa and without recompute, got {other}")
    model = CostModel(graph, cluster, batch_examples, recompute=recompute and cluster.memory_bytes < math.inf)
    if microbatches is not None and not 1 <= microbatches <= batch_examples:
        raise InputError(f"microbatches must be 1 to {batch_examples}, the examples of a batch, got {microbatches}")
    counts = _counts(batch_examples, cluster.devices) if microbatches is None else [microbatches]
    choices = _replica_choices(replicas, cluster.devices)
    names = list(PLANNERS) if planner == AUTO else list(dict.fromkeys([planner, "pipedream"]))
    found = _search(
        model, names, choices, counts, mixed_sizes=mixed_sizes, intra_operator=intra_operator, on_search=on_search
    )
    chosen = found if planner == AUTO else {planner: found[planner]}
    bests = {name: fastest(model, candidates(model, name, found[name])) for name in chosen}
    staged = [partition for partition in bests.values() if partition is not None]
    if not staged:
        if planner == "piper" and closed_sets(graph, MOST_SETS) is None:
            raise InputError(
                f"planner piper: expected a graph of at most {MOST_SETS} downsets, got more; use graphpipe"
            )
        raise InputError(_does_not_fit(model, counts, replicas))
    best = min(staged, key=lambda partition: partition.step_s)
    one_device = whole(model, 1, counts)
    data_parallel = _data_parallel(model, counts, choices)
    for one_stage in (data_parallel, one_device):  # the searches can miss them, since they minimise bottlenecks
        if one_stage is not None and one_stage.step_s <= best.step_s:
            best = one_stage
    results = [each for name in chosen for each in found[name] if not each.relay] or [
        each for name in chosen for each in found[name]
    ]
    return Plan(
        partition=best,
        least_bottleneck_s=min(each.bottleneck_s for each in results),
        least_chain_bottleneck_s=min((each.bottleneck_s for each in found["pipedream"]), default=None),
        exact=any(name in chosen and found[name] and all(each.exact for each in found[name]) for name in _EXACT),
        one_device=one_device,
        alternatives=tuple(_alternatives(model, data_parallel, found["pipedream"], bests)),
    )


#: Planners that can prove the least bottleneck.
_EXACT = ("graphpipe", "piper")


def _search(
    model: CostModel,
    names: Sequence[str],
    choices: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    *,
    mixed_sizes: bool,
    intra_operator: bool,
    on_search: Callable[[int, int], None],
) -> dict[str, list[Found]]:
    """What each planner found, for each choice of replicas and micro-batches."""
    # With memory for all activations another layout can be faster than those that need recomputation.
    models = [model] if not model.recompute else [CostModel(model.graph, model.cluster, model.batch_examples), model]
    groups: dict[str, list[tuple[int, ...]]] = {name: [(count,) for count in counts] for name in names}
    if mixed_sizes and len(counts) > 1 and "graphpipe" in groups:
        groups["graphpipe"].append(tuple(counts))
    searches = [
        (name, Problem(model=each, replicas=allowed, microbatches=group, intra_operator=divided))
        for name in names
        for each in models
        for allowed in choices
        for group in groups[name]
        for divided in ((False, True) if intra_operator and name == "alpa" else (False,))
    ]
    found: dict[str, list[Found]] = {name: [] for name in names}
    for done, (name, problem) in enumerate(searches, start=1):
        result = PLANNERS[name](problem)
        found[name] += [] if result is None else [result]
        on_search(done, len(searches))
    return found


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


def _data_parallel(model: CostModel, counts: Sequence[int], choices: Sequence[tuple[int, ...]]) -> Partition | None:
    """The whole model on every device, if that is allowed and fits."""
    devices = model.cluster.devices
    allowed = devices > 1 and any(devices in replicas for replicas in choices)
    return whole(model, devices, counts) if allowed else None


def _alternatives(
    model: CostModel,
    data_parallel: Partition | None,
    chains: Sequence[Found],
    bests: Mapping[str, Partition | None],
) -> Iterator[Alternative]:
    if data_parallel is not None:
        yield Alternative(name="data parallel", partition=data_parallel)
    for schedule in LINEAR_SCHEDULES:
        best = fastest(model, chain_candidates(model, "pipedream", chains, schedule))
        if best is not None:
            yield Alternative(name=f"chain, {schedule}", partition=best)
    for name, partition in bests.items() if len(bests) > 1 else ():
        if partition is not None:
            yield Alternative(name=name, partition=partition)


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
