"""Operator graphs for tests: chosen shapes, the models of the GraphPipe paper, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
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
    )


@st.composite
def operator_graphs(draw: st.DrawFn, max_size: int, *, chains: bool = False) -> OperatorGraph:
    """Any graph (or chain) of a few operators. Costs are small integers, so that ties and zeros occur."""
    size = draw(st.integers(1, max_size))
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
def models(draw: st.DrawFn, max_size: int, *, chains: bool = False, has_memory: bool = True) -> CostModel:
    """A random graph, a cluster with (unless `has_memory` is False) possibly little memory, and a batch size."""
    cluster = Cluster(
        devices=draw(st.integers(1, 5)),
        memory_bytes=draw(st.sampled_from([math.inf, 60, 120, 240, 480])) if has_memory else math.inf,
        network=Network(
            bandwidth_bytes_per_s=draw(st.sampled_from([math.inf, 1.0, 0.25])),
            latency_s=draw(st.sampled_from([0.0, 2.0])),
        ),
    )
    return CostModel(draw(operator_graphs(max_size, chains=chains)), cluster, draw(st.sampled_from([16, 10])))


def valid(model: CostModel, layout: Sequence[Placed]) -> bool:
    """Assert that every operator occurs once, stages are in order, and devices and memory suffice."""
    check_cover(cover(model, layout))
    devices = sum(stage.replicas for stage in layout)
    return all(stage.mask for stage in layout) and devices <= model.cluster.devices and fits_all(model, layout)
