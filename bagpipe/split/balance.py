"""`graph_names`: stages of a model as a graph, branch beside branch, the same in every process.

    ModelParts ──costs by shapes──> OperatorGraph ──partition.find──> layouts ──least (M + depth - 1) · max──> names

Measured costs differ from run to run, and with them the stages, the order of sums and the results' last bits. So a job
that names no stages goes by shapes; `python -m bagpipe plan` measures, and prints names to give the job.
"""

from __future__ import annotations

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.operators import Cost, Operator, OperatorGraph, members
from bagpipe.partition.search import find
from bagpipe.split.assignment import chain_names, estimate_cost
from bagpipe.split.operators import ModelParts

__all__ = ["graph_names", "shape_graph"]


def shape_graph(parts: ModelParts) -> OperatorGraph:
    """The operators with costs by shapes, in arithmetic operations instead of seconds; a backward is two forwards."""
    costs = [estimate_cost(parts, item) for item in parts.operators]
    return OperatorGraph(
        operators=tuple(
            Operator(name=item.name, forward=Cost(per_example_s=cost), backward=Cost(per_example_s=2 * cost))
            for item, cost in zip(parts.operators, costs, strict=True)
        ),
        edges=tuple((parts.operators[source].name, item.name) for item in parts.operators for source in item.inputs),
    )


def graph_names(parts: ModelParts, num_stages: int, microbatches: int) -> dict[str, int]:
    """Stage by operator name: exactly so many stages, with the least time for a batch on as many devices.

    Args:
        parts: the model.
        num_stages: how many; where no graph of so many is better than a chain, they are one.
        microbatches: per batch.

    Raises:
        InputError: fewer operators than stages, or a number below 1.
    """
    chained = chain_names(parts, num_stages)
    model = CostModel(shape_graph(parts), Cluster(devices=num_stages), microbatches)
    found = find(model, [1], [microbatches])
    layouts = [layout for layout in (found.layouts if found is not None else ()) if len(layout) == num_stages]

    def step_time(layout: Layout) -> float:
        return (microbatches + max(model.in_flight(layout)) - 1) * model.bottleneck(layout)

    if not layouts:
        return chained
    best = min(layouts, key=step_time)
    names = [operator.name for operator in model.graph.operators]
    return {names[number]: stage for stage, placed in enumerate(best) for number in members(placed.mask)}
