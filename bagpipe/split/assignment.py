"""Which stage runs which node: by names that the user gives, or as a chain of equal cost.

    {path: stage} ──by_names──> {node: stage} <──chain_names──> number of stages

Rule for names: a node goes where the longest name that its path starts with says. A node that no name covers goes with
its inputs: to the stage of the last of them that the forward computes; with none, to the stage of its first user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from torch import fx

from bagpipe.errors import InputError
from bagpipe.split.calls import function_name
from bagpipe.split.operators import ModelParts, Operator, named_parameters, operands

__all__ = ["by_names", "chain_names", "estimate_cost"]

#: Arithmetic operations that take about as long as moving one number to or from memory.
OPERATIONS_PER_MOVE = 4


def by_names(parts: ModelParts, stages: Mapping[str, int]) -> dict[fx.Node, int]:
    """Stage of every node of the dense part.

    Args:
        parts: the model.
        stages: stage numbers by path: of a module, or of an operator.

    Raises:
        InputError: a name that is no dense part of the model, or stage numbers that are not 0, 1, … each with a node.
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
    """Whether a path is the named one or inside it."""
    return path == name or path.startswith(f"{name}.")


def chain_names(parts: ModelParts, num_stages: int, costs: Mapping[str, float] | None = None) -> dict[str, int]:
    """Stage by operator name: consecutive operators, the dearest stage as cheap as can be, then the least sent.

    Args:
        parts: the model.
        num_stages: how many.
        costs: per operator name, in any unit (default: `estimate_cost`, so that every process cuts alike).

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


def estimate_cost(parts: ModelParts, item: Operator) -> float:
    """Operations per example of a forward, by shapes alone: two per weight and use, and those of moving numbers."""
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
    """Numbers per example that cross from operators before a position to those from it on; by position."""
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
    """First operator of every stage: least maximum of the stages' costs, then least crossing."""
    upto = list(accumulate(costs, initial=0.0))
    count = len(costs)
    least = [0.0, *[float("inf")] * count]
    for _ in range(num_stages):
        least = [
            min((max(least[cut], upto[end] - upto[cut]) for cut in range(end)), default=float("inf"))
            for end in range(count + 1)
        ]
    # Now the least crossing with no stage above that; (crossing, firsts) by operators covered.
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
            raise InputError(f"stage name {name!r} is in the embedding source, which is no stage: leave it out")
        if any(covers(name, path) for path in traced.dead_paths):
            raise InputError(f"stage name {name!r} has no path to a loss: no output of the model depends on it")
        raise InputError(f"stage name {name!r} is not in the model; it has {', '.join(_near(name, dense))}")


def _near(name: str, paths: Sequence[str]) -> list[str]:
    """Names one step below the longest beginning of `name` that exists."""
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
