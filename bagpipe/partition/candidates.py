"""`Candidate`: stages with a schedule, to be simulated; and the ways to collect them.

planners ──layouts──> found ──candidates──> Candidate ──fastest──> Partition
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.planner import Found
from bagpipe.partition.predict import Prediction, cover, micro_seconds, predict, stage_graph, stage_ranks
from bagpipe.partition.result import Partition, StagePlan
from bagpipe.partition.splits import bottleneck
from bagpipe.schedule.analysis.cover import check_cover
from bagpipe.schedule.registry import LINEAR_SCHEDULES

__all__ = ["WHOLE", "Candidate", "candidates", "chain_candidates", "fastest", "whole"]

#: Planner of a model that is one stage.
WHOLE = "whole"

#: Layouts with the best estimates that are simulated, per kind.
_SIMULATED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages with a schedule.

    Attributes:
        layout: the stages.
        planner: that found them.
        bottleneck_s: seconds per example of the slowest stage, relays included.
        schedule: name of a dense schedule.
        relay: the stages are a chain that relays what later stages need.
    """

    layout: Layout
    planner: str
    bottleneck_s: float
    schedule: str = "graph"
    relay: bool = False


def candidates(model: CostModel, planner: str, found: Sequence[Found]) -> Iterator[Candidate]:
    """Layouts of a planner to simulate as graphs: the best estimates, the least bottleneck, the best without relays."""
    graphs = [each for each in found if not each.relay]
    linear = _promising(model, [layout for each in found if each.relay for layout in each.layouts])
    likely = _likely(model, graphs) if graphs else []
    for layout in dict.fromkeys([*likely, *linear]):
        equal = len({stage.microbatches for stage in layout}) == 1
        schedules = LINEAR_SCHEDULES if layout in linear else ("gpipe", "eager-1f1b")
        for schedule in ("graph", *(schedules if equal and len(layout) > 1 else ())):
            yield Candidate(layout=layout, planner=planner, bottleneck_s=bottleneck(model, layout), schedule=schedule)


def _likely(model: CostModel, found: Sequence[Found]) -> list[Layout]:
    estimates = {layout: _estimate(model, layout) for each in found for layout in each.layouts}
    in_order = sorted(estimates, key=lambda layout: estimates[layout])
    # One per search as well, since the best estimates overall are often similar.
    first = sorted((min(each.layouts, key=lambda x: estimates[x]) for each in found), key=lambda x: estimates[x])
    return [*in_order[:_SIMULATED], *first[:_SIMULATED], min(estimates, key=model.bottleneck)]


def chain_candidates(model: CostModel, planner: str, found: Sequence[Found], schedule: str) -> Iterator[Candidate]:
    """The promising chains of a planner with their relays, under one schedule."""
    chains = {layout: each.bottleneck_s for each in found if each.relay for layout in each.layouts}
    for layout in _promising(model, chains):
        yield Candidate(layout=layout, planner=planner, bottleneck_s=chains[layout], schedule=schedule, relay=True)


def _promising(model: CostModel, layouts: Iterable[Layout]) -> list[Layout]:
    return sorted(dict.fromkeys(layouts), key=lambda layout: _estimate(model, layout))[:_SIMULATED]


def _estimate(model: CostModel, layout: Layout) -> float:
    """Step time if all stages were the slowest: (M + depth - 1) micro-batches, plus delays of the hops."""
    smallest = model.batch_examples / max(stage.microbatches for stage in layout)
    fill = max(model.in_flight(layout)) - smallest  # examples before the last stage begins
    busiest = max(model.totals(stage.mask).transfer_bytes / stage.replicas for stage in layout)
    hop_s = model.cluster.network.latency_s + smallest * busiest / model.rank_bandwidth_bytes_per_s
    return bottleneck(model, layout) * (model.batch_examples + fill) + 2 * fill / smallest * hop_s


def whole(model: CostModel, replicas: int, counts: Sequence[int]) -> Partition | None:
    """The model as one stage."""
    layouts = [(Placed(model.graph.everything, replicas, count),) for count in counts]
    return fastest(model, [Candidate(layout=x, planner=WHOLE, bottleneck_s=model.bottleneck(x)) for x in layouts])


def fastest(model: CostModel, among: Iterable[Candidate]) -> Partition | None:
    """The candidate with the least step time among those that fit."""
    best: tuple[Candidate, Prediction] | None = None
    for candidate in among:
        predicted = predict(model, candidate.layout, candidate.schedule, relay=candidate.relay)
        if predicted.fits and (best is None or predicted.step_s < best[1].step_s):
            best = candidate, predicted
    return None if best is None else _partition(model, *best)


def _partition(model: CostModel, candidate: Candidate, predicted: Prediction) -> Partition:
    layout = candidate.layout
    if not candidate.relay:
        check_cover(cover(model, layout))
    stages = []
    for number, (stage, ranks) in enumerate(zip(layout, stage_ranks(layout), strict=True)):
        forward_s, backward_s = micro_seconds(model, stage, ranks)
        stages.append(
            StagePlan(
                operators=model.graph.names(stage.mask),
                replicas=stage.replicas,
                microbatches=stage.microbatches,
                in_flight=predicted.in_flight[number],
                forward_s=forward_s,
                backward_s=backward_s,
                time_per_example_s=bottleneck(model, [stage]),
                memory_bytes=predicted.memory_bytes[number],
                recompute=predicted.recompute[number],
                splits=stage.splits,
            )
        )
    return Partition(
        stages=tuple(stages),
        graph=stage_graph(model, layout, relay=candidate.relay),
        schedule=candidate.schedule,
        planner=candidate.planner,
        bottleneck_s=candidate.bottleneck_s,
        step_s=predicted.step_s,
        bubble=predicted.bubble,
    )
