"""Assigns operators to stages: by user-given names, as a chain of equal cost, or as a graph of branches.

    number of stages ──chain_stages, graph_stages──> {operator: stage} ─┐
                                user: {path: stage} ────────────────────┴──stages_of_nodes──> {node: stage}

Rule for names: the longest name that is a prefix of a node's path decides. A node without a name joins the stage of the
last of its inputs that the forward computes; a node without inputs joins the stage of its first user.

`chain_stages` and `graph_stages` use costs from shapes. Measured costs differ from run to run, and with them the
stages, the order of sums and the last bits of results. `python -m bagpipe plan` measures and prints names to configure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import fx

from bagpipe.errors import InputError
from bagpipe.partition import operators as partition
from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.search import find
from bagpipe.split.operators import ModelParts, Operator, named_parameters, operands
from bagpipe.split.trace import function_name

__all__ = ["chain_stages", "estimate_cost", "graph_stages", "shape_graph", "stages_of_nodes"]

#: Arithmetic operations that take about as long as moving one number to or from memory.
OPERATIONS_PER_MOVE = 4


def stages_of_nodes(parts: ModelParts, stages: Mapping[str, int]) -> dict[fx.Node, int]:
    """Stage of every node of the dense part.

    Args:
        parts: the model.
        stages: stage number by path of a module or an operator.

    Raises:
        InputError: a name outside the dense part of the model, or stage numbers that are not 0, 1, … each with a node.
    """
    paths = parts.traced.paths
    nodes = parts.dense_nodes
    _check_names(parts, stages)
    _check_numbers(stages)
    if set(stages) == {item.name for item in parts.operators}:
        return {node: stages[item.name] for item in parts.operators for node in item.nodes}
    position = {node: number for number, node in enumerate(nodes)}
    chosen: dict[fx.Node, int] = {}
    for node in nodes:
        names = [name for name in stages if covers(name, paths[node])]
        fed = [n for n in operands(node) if n in chosen]
        loose = [n for n in fed if not parts.shapes[n].by_example]
        if names:
            chosen[node] = stages[max(names, key=len)]
        elif fed:
            chosen[node] = chosen[max(loose or fed, key=position.__getitem__)]
    for node in reversed(nodes):
        if node not in chosen:
            chosen[node] = next(chosen[user] for user in nodes if node in operands(user))
    for stage in range(max(stages.values()) + 1):
        if stage not in chosen.values():
            names = [name for name, number in stages.items() if number == stage]
            raise InputError(f"stage {stage} ({', '.join(names)}) has no operator: longer names take all of them")
    return chosen


def covers(name: str, path: str) -> bool:
    """Whether `path` is `name` or inside it."""
    return path == name or path.startswith(f"{name}.")


def chain_stages(parts: ModelParts, num_stages: int, costs: Mapping[str, float] | None = None) -> dict[str, int]:
    """Stage by operator name: consecutive operators with the least maximum cost, then the least traffic.

    Args:
        parts: the model.
        num_stages: number of stages.
        costs: per operator name, in any unit; default: `estimate_cost`, which is the same in every process.

    Raises:
        InputError: fewer operators than stages, a number below 1, or costs of other operators.
    """
    items = parts.operators
    if not 1 <= num_stages <= len(items):
        raise InputError(
            f"pipeline.stages must be 1 to {len(items)}, the operators of the model's dense part, got {num_stages}"
        )
    lacking = [item.name for item in items if costs is not None and item.name not in costs]
    if lacking:
        raise InputError(f"costs: expected one per operator, there is none for {lacking[0]!r}")
    own = [estimate_cost(parts, item) if costs is None else costs[item.name] for item in items]
    starts = _cut(own, _crossing(parts), num_stages)
    return {item.name: sum(number >= start for start in starts) - 1 for number, item in enumerate(items)}


def shape_graph(parts: ModelParts) -> partition.OperatorGraph:
    """The operators with costs from shapes, in arithmetic operations; a backward costs two forwards."""
    costs = [estimate_cost(parts, item) for item in parts.operators]
    return partition.OperatorGraph(
        operators=tuple(
            partition.Operator(
                name=item.name,
                forward=partition.Cost(per_example_s=cost),
                backward=partition.Cost(per_example_s=2 * cost),
            )
            for item, cost in zip(parts.operators, costs, strict=True)
        ),
        edges=tuple((parts.operators[source].name, item.name) for item in parts.operators for source in item.inputs),
    )


def graph_stages(parts: ModelParts, num_stages: int, microbatches: int) -> dict[str, int]:
    """Stage by operator name: exactly `num_stages` stages with the least step time on as many devices.

    Args:
        parts: the model.
        num_stages: number of stages; they form a chain where no graph of as many stages is better.
        microbatches: per batch.

    Raises:
        InputError: fewer operators than stages, or a number below 1.
    """
    chained = chain_stages(parts, num_stages)
    model = CostModel(shape_graph(parts), Cluster(devices=num_stages), microbatches)
    found = find(model, [1], [microbatches])
    layouts = [layout for layout in (found.layouts if found is not None else ()) if len(layout) == num_stages]

    def step_time(layout: Layout) -> float:
        return (microbatches + max(model.in_flight(layout)) - 1) * model.bottleneck(layout)

    if not layouts:
        return chained
    best = min(layouts, key=step_time)
    names = [operator.name for operator in model.graph.operators]
    return {names[number]: stage for stage, placed in enumerate(best) for number in partition.members(placed.mask)}


def estimate_cost(parts: ModelParts, item: Operator) -> float:
    """Operations of a forward per example, from shapes: two per weight and use, plus the cost of moving elements."""
    return sum(_node_cost(parts, node) for node in item.nodes)


def _node_cost(parts: ModelParts, node: fx.Node) -> float:
    shapes = parts.shapes
    taken = operands(node)
    moved = shapes[node].elements + sum(shapes[n].elements for n in taken)
    weights = sum(p.numel() for p in named_parameters(parts.traced, node).values() if p.dim() > 1)
    shape = shapes[node].shape
    uses = shapes[node].elements // max(1, shape[-1]) if shape else 1
    products = 0
    if not weights and function_name(node) in ("matmul", "bmm", "einsum", "baddbmm"):
        products = shapes[node].elements * (shapes[taken[0]].shape[-1] if shapes[taken[0]].shape else 1)
    return float(2 * weights * uses + 2 * products + OPERATIONS_PER_MOVE * moved)


def _crossing(parts: ModelParts) -> list[int]:
    """Per position, elements per example that pass from operators before it to operators at or after it."""
    position = {node: number for number, item in enumerate(parts.operators) for node in item.nodes}
    last: dict[fx.Node, int] = {}
    for node, number in position.items():
        for source in operands(node):
            if source in position:
                last[source] = max(last.get(source, 0), number)
    return [
        sum(parts.shapes[node].elements for node, user in last.items() if position[node] < cut <= user)
        for cut in range(len(parts.operators))
    ]


def _cut(costs: Sequence[float], crossing: Sequence[int], num_stages: int) -> list[int]:
    """First operator of every stage: least maximum cost of a stage, then least crossing."""
    upto = list(accumulate(costs, initial=0.0))
    count = len(costs)
    least = [0.0, *[float("inf")] * count]
    for _ in range(num_stages):
        least = [
            min((max(least[cut], upto[end] - upto[cut]) for cut in range(end)), default=float("inf"))
            for end in range(count + 1)
        ]
    # The least crossing with no stage above that cost; (crossing, first operators) by operators covered.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(float("inf"), ())] * count]
    for _ in range(num_stages):
        best = [
            min(
                (
                    (best[cut][0] + crossing[cut], (*best[cut][1], cut))
                    for cut in range(end)
                    if upto[end] - upto[cut] <= least[count]
                ),
                default=(float("inf"), ()),
            )
            for end in range(count + 1)
        ]
    return list(best[count][1])


def _check_names(parts: ModelParts, stages: Mapping[str, int]) -> None:
    traced = parts.traced
    dense = [traced.paths[node] for node in parts.dense_nodes]
    for name in stages:
        if any(covers(name, path) for path in dense):
            continue
        if any(covers(name, traced.paths[node]) for node in parts.embedding_nodes):
            raise InputError(f"stage name {name!r} belongs to the embedding stage, which has no number: leave it out")
        if any(covers(name, path) for path in traced.dead_paths):
            raise InputError(f"stage name {name!r} has no path to a loss: no output of the model depends on it")
        raise InputError(f"stage name {name!r} is not in the model; it has {', '.join(_near(name, dense))}")


def _near(name: str, paths: Sequence[str]) -> list[str]:
    """Names one level below the longest existing prefix of `name`."""
    steps = name.split(".")
    known = max(
        (n for n in range(len(steps)) if n == 0 or any(covers(".".join(steps[:n]), path) for path in paths)),
    )
    prefix = steps[:known]
    below = [path.split(".")[: known + 1] for path in paths if path.split(".")[:known] == prefix]
    return list(dict.fromkeys(".".join(step) for step in below))


def _check_numbers(stages: Mapping[str, int]) -> None:
    numbers = sorted(set(stages.values()))
    if numbers != list(range(len(numbers))) or not numbers:
        raise InputError(f"stage numbers must be 0, 1, … without a gap, got {numbers}")
