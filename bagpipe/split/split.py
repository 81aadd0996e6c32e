"""`split`: cuts a model into a `StagedModel`, an embedding stage and dense stages, bit for bit the same function.

    model ──trace, classify_nodes──> ModelParts ──stages_of_nodes or chain_stages──> {node: stage} ──cut──> StagedModel

A value goes from the stage that computes it to every stage that uses it. Values of the embedding stage with the same
consumers travel side by side in one tensor. Modules and parameters are the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx, nn

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.split.assignment import chain_stages, stages_of_nodes
from bagpipe.split.extract import extract
from bagpipe.split.operators import ModelParts, classify_nodes, named_parameters, operands
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue
from bagpipe.split.trace import Traced, function_name, is_in_place, trace

__all__ = ["cut", "split", "split_parts", "trace_parts"]

#: Functions that draw random numbers.
RANDOM_FUNCTIONS = frozenset(
    {
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "random",
        "bernoulli",
        "binomial",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "multinomial",
        "poisson",
        "uniform",
        "rrelu",
        "scaled_dot_product_attention",
        "gumbel_softmax",
    }
)
_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RReLU)


def split(
    model: nn.Module,
    *,
    stages: int | Mapping[str, int],
    num_dense: int,
    dtype: torch.dtype,
    costs: Mapping[str, float] | None = None,
) -> StagedModel:
    """Split a model.

    Args:
        model: called as ``model(dense, sparse)``; gives logits or a tuple of them. Its parameters are real.
        stages: a number, for a chain of equal cost; or stage numbers by path (see `stages_of_nodes`).
        num_dense: columns of the dense input.
        dtype: of the dense input, of embeddings and parameters.
        costs: per operator, for a chain (default: by shapes, the same in every process).

    Raises:
        InputError: the model cannot be traced; names, numbers or costs do not fit it; the stages feed each other in a
            cycle, share a parameter, or would exchange something that does not have one row per example.
    """
    named = () if isinstance(stages, int) else tuple(stages)
    parts = trace_parts(model, num_dense=num_dense, dtype=dtype, named=named)
    return split_parts(parts, stages=stages, costs=costs)


def split_parts(
    parts: ModelParts, *, stages: int | Mapping[str, int], costs: Mapping[str, float] | None = None
) -> StagedModel:
    """`split` of a model that is already traced.

    Raises:
        InputError: as for `split`.
    """
    if isinstance(stages, int):
        names = chain_stages(parts, stages, costs)
        return cut(parts, stages_of_nodes(parts, names), _chain_titles(names))
    return cut(parts, stages_of_nodes(parts, stages), _titles(stages))


def trace_parts(model: nn.Module, *, num_dense: int, dtype: torch.dtype, named: Sequence[str] = ()) -> ModelParts:
    """Trace a model and classify its nodes.

    Args:
        model, num_dense, dtype: as for `split`.
        named: paths of modules that become single nodes if the model cannot be traced otherwise.

    Raises:
        InputError: as for `split`.
    """
    try:
        traced = trace(model)
    except InputError:
        if not named:
            raise
        traced = trace(model, named)
    return classify_nodes(traced, num_dense=num_dense, dtype=dtype)


def cut(parts: ModelParts, stage_of: Mapping[fx.Node, int], titles: Sequence[str]) -> StagedModel:
    """The stage modules.

    Args:
        parts: the model.
        stage_of: stage of every node of the dense part.
        titles: names of the stages, by number.

    Raises:
        InputError: the stages feed each other in a cycle, share a parameter, or exchange something that does not have
            one row per example.
    """
    _check_parameters(parts, stage_of, titles)
    _check_order(parts, stage_of, titles)
    flows = _flows(parts, stage_of, len(titles))
    from_embedding = [flow.nodes for flow in flows if flow.producer == len(titles)]
    _, sparse = (node for node in parts.traced.graph.nodes if node.op == "placeholder")
    return StagedModel(
        model=parts.traced.model,
        embedding=extract(parts, "Embedding", parts.embedding_nodes, [(parts.dense,), (sparse,)], from_embedding),
        stages=tuple(_stage(parts, stage_of, flows, number, title) for number, title in enumerate(titles)),
        values=tuple(_value(parts, flow) for flow in flows),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flow:
    """Nodes whose results leave their stage as one value."""

    nodes: tuple[fx.Node, ...]
    producer: int
    consumers: tuple[int, ...]


def _flows(parts: ModelParts, stage_of: Mapping[fx.Node, int], num_stages: int) -> list[_Flow]:
    """Flows of the embedding stage first, then in forward order."""
    takers: dict[fx.Node, set[int]] = {}
    for node in parts.dense_nodes:
        for source in operands(node):
            if stage_of.get(source, num_stages) != stage_of[node]:
                takers.setdefault(source, set()).add(stage_of[node])
    for head in parts.heads:
        takers.setdefault(head, set())
    pooled: dict[object, list[fx.Node]] = {}
    made: list[_Flow] = []
    for node in (node for node in parts.traced.graph.nodes if node in takers):
        shape, consumers = parts.shapes[node], tuple(sorted(takers[node]))
        if not shape.by_example:
            raise InputError(
                f"{parts.traced.paths[node]}: its result goes to stages {list(consumers)} but is not a "
                "tensor with one row per example; name its users together with it"
            )
        if node in stage_of:
            made.append(_Flow(nodes=(node,), producer=stage_of[node], consumers=consumers))
        else:
            pooled.setdefault((consumers, shape.dtype, shape.wants_grad), []).append(node)
    together = [
        _Flow(nodes=tuple(nodes), producer=num_stages, consumers=tuple(sorted(takers[nodes[0]])))
        for nodes in pooled.values()
    ]
    return together + made


def _value(parts: ModelParts, flow: _Flow) -> StageValue:
    first = parts.shapes[flow.nodes[0]]
    assert first.dtype is not None  # a tensor, by the check of flows
    name = parts.traced.paths.get(flow.nodes[0], flow.nodes[0].name)
    more = len(flow.nodes) - 1
    return StageValue(
        name=f"{name} and {more} more" if more else name,
        producer=flow.producer,
        consumers=flow.consumers,
        shape=(sum(parts.shapes[node].elements for node in flow.nodes),) if more else first.shape,
        dtype=first.dtype,
        wants_grad=first.wants_grad,
    )


def _stage(
    parts: ModelParts, stage_of: Mapping[fx.Node, int], flows: Sequence[_Flow], number: int, title: str
) -> StageModule:
    nodes = [node for node in parts.dense_nodes if stage_of[node] == number]
    inputs = [n for n, flow in enumerate(flows) if number in flow.consumers]
    outputs = [n for n, flow in enumerate(flows) if flow.producer == number]
    positions = {flow.nodes[0]: n for n, flow in enumerate(flows)}
    _check_in_place(parts, stage_of, nodes, {node for n in inputs for node in flows[n].nodes}, title)
    taken, given = ([flows[n].nodes for n in numbers] for numbers in (inputs, outputs))
    return StageModule(
        name=title,
        module=extract(parts, f"Stage{number}", nodes, taken, given),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        heads=tuple((n, positions[head]) for n, head in enumerate(parts.heads) if stage_of[head] == number),
        uses_random=any(_is_random(parts.traced, node) for node in nodes),
    )


def _is_random(traced: Traced, node: fx.Node) -> bool:
    module = traced.called(node)
    if module is not None:
        return any(isinstance(part, _RANDOM_MODULES) or _dropout_of(part) > 0 for part in module.modules())
    return function_name(node).rstrip("_") in RANDOM_FUNCTIONS


def _dropout_of(module: nn.Module) -> float:
    """The dropout probability of torch's attention and recurrent modules."""
    found = getattr(module, "dropout", 0.0)
    return found if isinstance(found, float) else 0.0


def _check_parameters(parts: ModelParts, stage_of: Mapping[fx.Node, int], titles: Sequence[str]) -> None:
    first: dict[int, int] = {}
    for node in parts.dense_nodes:
        for name, parameter in named_parameters(parts.traced, node).items():
            stage = first.setdefault(id(parameter), stage_of[node])
            if stage != stage_of[node]:
                raise InputError(
                    f"parameter {name!r} is used in stages {stage} ({titles[stage]}) and {stage_of[node]} "
                    f"({titles[stage_of[node]]}); put its users into one stage"
                )


def _check_order(parts: ModelParts, stage_of: Mapping[fx.Node, int], titles: Sequence[str]) -> None:
    edges = {
        (stage_of[source], stage_of[node]): (source, node)
        for node in parts.dense_nodes
        for source in operands(node)
        if source in stage_of and stage_of[source] != stage_of[node]
    }
    try:
        StageGraph(micro_per_batch=(1,) * len(titles), edges=tuple(sorted(edges)))
    except ScheduleError as error:
        paths = parts.traced.paths
        cycle = [int(stage) for stage in str(error).rpartition(": ")[2].split(" -> ")]
        spelt = "; ".join(
            f"{paths[edges[pair][0]]} of stage {pair[0]} feeds {paths[edges[pair][1]]} of stage {pair[1]}"
            for pair in pairwise(cycle)
        )
        raise InputError(f"{error}: {spelt}") from None


def _check_in_place(
    parts: ModelParts, stage_of: Mapping[fx.Node, int], nodes: Sequence[fx.Node], inputs: set[fx.Node], title: str
) -> None:
    """Refuse in-place changes that another stage would see."""
    for node in nodes:
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or not is_in_place(node, parts.traced.called(node)):
            continue
        elsewhere = [user for user in changed.users if stage_of.get(user, stage_of[node]) != stage_of[node]]
        if changed in inputs or elsewhere:
            what = f"an input of stage {title}" if changed in inputs else f"what {_path(parts, elsewhere[0])} takes"
            raise InputError(
                f"{_path(parts, node)}: changes {what} in place; "
                "make it return a new tensor, or put it into the stage that computes its input"
            )


def _path(parts: ModelParts, node: fx.Node) -> str:
    return parts.traced.paths[node]


def _titles(stages: Mapping[str, int]) -> list[str]:
    """Per stage, its names joined."""
    return [
        "+".join(name for name, stage in stages.items() if stage == number)
        for number in range(max(stages.values(), default=-1) + 1)
    ]


def _chain_titles(stages: Mapping[str, int]) -> list[str]:
    """Per stage, the top-level modules of its first and last operators."""
    titles = []
    for number in range(max(stages.values()) + 1):
        tops = [name.partition(".")[0] for name, stage in stages.items() if stage == number]
        titles.append(tops[0] if tops[0] == tops[-1] else f"{tops[0]} to {tops[-1]}")
    return titles
