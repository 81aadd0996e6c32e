from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition import alpa as module
from bagpipe.partition.alpa import MOST_LAYERS, alpa, least_total, submeshes
from bagpipe.partition.bisect import Layout
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.planner import Problem
from tests.partition.all_chains import all_chains
from tests.partition.graphs import graph, models, towers
from tests.partition.pareto_total import pareto_total

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (2,)])


@settings(max_examples=50)
@given(models(5), REPLICAS, st.sampled_from([1, 4]))
def test_the_least_total(model: CostModel, replicas: Sequence[int], count: int):
    """Compared with all chains."""
    search = ChainSearch(model, replicas, count)
    chains = all_chains(search)
    found = least_total(search)
    assert (found is None) == (not chains)

    def total(layout: Layout) -> float:
        ends = list(itertools.accumulate(stage.mask.bit_count() for stage in layout))
        times = [
            search.times[search.replicas.tolist().index(stage.replicas), end - stage.mask.bit_count(), end]
            for stage, end in zip(layout, ends, strict=True)
        ]
        return float(sum(times) + (count - 1) * max(times)) * model.batch_examples / count

    if found is not None:
        assert found.layout in chains
        assert found.total_s == pytest.approx(total(found.layout), rel=1e-9)
        assert found.total_s == pytest.approx(min(map(total, chains)), rel=1e-9)


@given(models(6), REPLICAS, st.sampled_from([1, 4]))
def test_both_programs_agree(model: CostModel, replicas: Sequence[int], count: int):
    """As Alpa's own test of its old program and its new one."""
    search = ChainSearch(model, replicas, count)
    found, other = least_total(search), pareto_total(search)
    assert (found is None) == (other is None)
    if found is not None:
        assert found.total_s == pytest.approx(other, rel=1e-9)


def test_layers_are_close(monkeypatch: pytest.MonkeyPatch):
    """34 operators in 24 layers: the total is at most 2 % above the least."""
    model = CostModel(towers(4, 8), Cluster(devices=8, network=Network(bandwidth_bytes_per_s=12.5e9)), 4096)
    search = ChainSearch(model, submeshes((8,)), 32)
    grouped = least_total(search)
    monkeypatch.setattr(module, "MOST_LAYERS", model.graph.size)
    exact = least_total(search)
    assert model.graph.size > MOST_LAYERS
    assert grouped is not None
    assert exact is not None
    assert exact.total_s * (1 - 1e-12) <= grouped.total_s <= 1.02 * exact.total_s


@pytest.mark.parametrize(
    ("host_sizes", "expected"),
    [((1,) * 4, (1, 2, 3, 4)), ((8,), (1, 2, 4, 8)), ((4, 4, 4), (1, 2, 4, 8, 12)), ((3, 3), (1, 2, 3, 6))],
)
def test_submeshes(host_sizes: tuple[int, ...], expected: tuple[int, ...]):
    assert submeshes(host_sizes) == expected


def test_the_planner_uses_submeshes_only():
    hosts = {rank: rank // 4 for rank in range(8)}
    model = CostModel(towers(2, 4), Cluster(devices=8, network=Network(hosts=hosts)), 1024)
    found = alpa(Problem(model=model, replicas=tuple(range(1, 9)), microbatches=(4, 8)))
    assert found is not None
    assert found.relay
    assert {stage.replicas for layout in found.layouts for stage in layout} <= {1, 2, 4, 8}


def test_nothing_fits():
    model = CostModel(graph(["ab"], param_bytes=9), Cluster(devices=2, memory_bytes=8), 8)
    assert alpa(Problem(model=model, replicas=(1,), microbatches=(4,))) is None
    assert alpa(Problem(model=model, replicas=(3,), microbatches=(4,))) is None
