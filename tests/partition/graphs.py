"""Operator graphs for tests: chosen shapes, the models of the GraphPipe paper, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.operators import Cost, Linear, Operator, OperatorGraph
from bagpipe.partition.predict import cover
from bagpipe.schedule.analysis.cover import check_cover
from tests.partition.exhaustive import fits_all


def operator(name: str, seconds: float = 1.0, **facts: float) -> Operator:
    """An operator of `seconds` per example, a third of it forward."""
    return Operator(
        name=name, forward=Cost(per_example_s=seconds / 3), backward=Cost(per_example_s=2 * seconds / 3), **facts
    )


def graph(
    edges: Sequence[str], seconds: dict[str, float] | None = None, alone: str = "", **facts: float
) -> OperatorGraph:
    """A graph from ``["ab", "bc"]``: operators are letters; `alone` names those without edges."""
    names = sorted(set("".join(edges)) | set(alone))
    return OperatorGraph(
        operators=tuple(operator(name, (seconds or {}).get(name, 1.0), **facts) for name in names),
        edges=tuple((edge[0], edge[1]) for edge in edges),
    )


def towers(branches: int, layers: int) -> OperatorGraph:
    """GraphPipe's DLRM and CANDLE-Uno: equal branches of wide layers, a concat, and a final layer. Costs of a V100."""
    operators, edges = [], []
    for branch in range(branches):
        for layer in range(layers):
            operators.append(_wide(f"{branch}.{layer}", 1))
            if layer:
                edges.append((f"{branch}.{layer - 1}", f"{branch}.{layer}"))
        edges.append((f"{branch}.{layers - 1}", "concat"))
    concat = Operator(name="concat", forward=Cost(), backward=Cost(), output_bytes=4096 * 4 * branches)
    return OperatorGraph(operators=(*operators, concat, _wide("post", 1)), edges=(*edges, ("concat", "post")))


def _wide(name: str, work: float) -> Operator:
    return Operator(
        name=name,
        forward=Cost(fixed_s=3e-5, per_example_s=4e-6 * work),
        backward=Cost(fixed_s=6e-5, per_example_s=8e-6 * work),
        param_bytes=4 * 4096 * 4096,
        activation_bytes=2 * 4 * 4096,
        output_bytes=4 * 4096,
        linear=Linear(weight_bytes=4 * 4096 * 4096, input_bytes=4 * 4096, output_bytes=4 * 4096),
    )


@st.composite
def operator_graphs(draw: st.DrawFn, max_size: int, *, min_size: int = 1, chains: bool = False) -> OperatorGraph:
    """Any graph (or chain) of a few operators. Costs are small integers, so that ties and zeros occur."""
    size = draw(st.integers(min_size, max_size))
    small = st.integers(0, 9)
    operators = tuple(
        Operator(
            name=f"op{number}",
            forward=Cost(fixed_s=draw(small), per_example_s=draw(small)),
            backward=Cost(fixed_s=draw(small), per_example_s=draw(small)),
            param_bytes=draw(small),
            activation_bytes=draw(small),
            output_bytes=draw(small),
        )
        for number in range(size)
    )
    pairs = [(one, other) for one in range(size) for other in range(one + 1, size)]
    chosen = [pair for pair in pairs if pair[1] == pair[0] + 1] if chains else [p for p in pairs if draw(st.booleans())]
    # Numbers need not be in topological order.
    place = draw(st.permutations(range(size)))
    return OperatorGraph(operators=operators, edges=tuple((f"op{place[a]}", f"op{place[b]}") for a, b in chosen))


@st.composite
def models(
    draw: st.DrawFn, max_size: int, *, min_size: int = 1, chains: bool = False, has_memory: bool = True
) -> CostModel:
    """A random graph, a cluster with (unless `has_memory` is False) possibly little memory, and a batch size."""
    cluster = Cluster(
        devices=draw(st.integers(1, 5)),
        memory_bytes=draw(st.sampled_from([math.inf, 60, 120, 240, 480])) if has_memory else math.inf,
        network=Network(
            bandwidth_bytes_per_s=draw(st.sampled_from([math.inf, 1.0, 0.25])),
            latency_s=draw(st.sampled_from([0.0, 2.0])),
        ),
    )
    return CostModel(
        draw(operator_graphs(max_size, min_size=min_size, chains=chains)), cluster, draw(st.sampled_from([16, 10]))
    )


@st.composite
def linear_models(draw: st.DrawFn, max_size: int, *, min_size: int = 1) -> CostModel:
    """As `models`, with linear layers of large weights and embedding vectors, on hosts of one or two devices."""
    model = draw(models(max_size, min_size=min_size, chains=draw(st.booleans())))
    small, heavy = st.integers(0, 9), draw(st.sampled_from([4, 20, 100]))
    operators = []
    for each in model.graph.operators:
        param_bytes = heavy * each.param_bytes
        linear = Linear(
            weight_bytes=draw(st.sampled_from([param_bytes, param_bytes / 2])),
            input_bytes=draw(small),
            output_bytes=draw(small),
            columns=draw(st.booleans()),
            rows=draw(st.booleans()),
        )
        known = draw(st.sampled_from([linear, None]))
        operators.append(replace(each, param_bytes=param_bytes, entering_bytes=draw(small), linear=known))
    per_host = draw(st.sampled_from([1, 2]))
    network = replace(
        model.cluster.network,
        hosts={rank: rank // per_host for rank in range(4)},
        local_bandwidth_bytes_per_s=draw(st.sampled_from([math.inf, 2.0])),
        local_latency_s=draw(st.sampled_from([None, 0.0])),
    )
    memory_bytes = draw(st.sampled_from([math.inf, 2000, 8000]))
    graph = OperatorGraph(operators=tuple(operators), edges=model.graph.edges)
    return CostModel(
        graph, replace(model.cluster, devices=4, network=network, memory_bytes=memory_bytes), model.batch_examples
    )


def valid(model: CostModel, layout: Sequence[Placed]) -> bool:
    """Assert that every operator occurs once, stages are in order, and devices and memory suffice."""
    check_cover(cover(model, layout))
    devices = sum(stage.replicas for stage in layout)
    return all(stage.mask for stage in layout) and devices <= model.cluster.devices and fits_all(model, layout)
