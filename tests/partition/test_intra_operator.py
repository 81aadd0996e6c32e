from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition import intra_operator as module
from bagpipe.partition.alpa import least_total
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.intra_operator import SplitSearch, fastest_splits
from bagpipe.partition.operators import union
from bagpipe.partition.splits import SplitModel, Work, is_batch, split_names
from tests.partition.graphs import linear_models, towers

COUNTS = st.sampled_from([1, 4])


def seconds(costs: SplitModel, work: Work) -> float:
    """Computation, collectives and all-reduce, per example, without the latency that all splits pay."""
    model = costs.model
    busy = (work.forward_s + work.backward_s) * costs.microbatches
    return (busy + work.synced_bytes * model.ring(costs.replicas)[0]) / model.batch_examples


def memory(costs: SplitModel, work: Work, examples: float) -> float:
    return costs.model.cluster.weight_copies * work.weight_bytes + examples * work.activation_bytes


@settings(max_examples=200)
@given(linear_models(4, min_size=4), st.integers(2, 4), COUNTS, st.sampled_from([None, 0.0, 0.2, 0.5]), st.data())
def test_the_fastest_of_all_splits(
    model: CostModel, replicas: int, count: int, share: float | None, data: st.DataObject
):
    """Compared with every assignment, each costed as a whole, of any run; memory suffices for a share of them."""
    run = model.graph.order[data.draw(st.sampled_from([0, 1])) : data.draw(st.sampled_from([4, 3]))]
    costs, mask = SplitModel(model, replicas, count), union(1 << n for n in run)
    names = [split_names(model.graph.operators[n], replicas) for n in run]
    works = {splits: costs.stage(mask, splits) for splits in itertools.product(*names)}
    needs = sorted(memory(costs, work, 3) for work in works.values())
    if share is not None and needs[0] > 0:
        limit = needs[int(share * (len(needs) - 1))] * (1 + 1e-9)
        model = CostModel(model.graph, replace(model.cluster, memory_bytes=limit), model.batch_examples)
        works = {splits: work for splits, work in works.items() if memory(costs, work, 3) <= limit}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_STATES", 3**4)
        patch.setattr(module, "MOST_WAYS", 4**4)
        found = fastest_splits(SplitModel(model, replicas, count), run, None if share is None else 3)
    assert found in works
    assert seconds(costs, works[found]) == pytest.approx(min(seconds(costs, each) for each in works.values()), rel=1e-9)


def test_nothing_fits():
    model = CostModel(towers(1, 2), Cluster(devices=2, memory_bytes=8), 64)
    assert fastest_splits(SplitModel(model, 2, 4), model.graph.order, 16) is None


@given(linear_models(5, min_size=3), COUNTS)
def test_no_stage_is_slower_than_by_examples(model: CostModel, count: int):
    chain = ChainSearch(model, (1, 2, 4), count)
    borders = list(range(model.graph.size + 1))
    search = SplitSearch(chain, borders)
    assert (search.times <= np.where(chain.fits, chain.times, np.inf)).all()
    for position, choice, start, end in itertools.product(*map(range, search.times.shape)):
        if search.times[position, choice, start, end] < math.inf:
            stage = search.placed(position, choice, start, end)
            costs = SplitModel(model, stage.replicas, count)
            work = costs.stage(stage.mask, stage.splits)
            transfer = chain.sums["transfer_bytes"][start, end]
            assert search.times[position, choice, start, end] == pytest.approx(costs.time_per_example(work, transfer))
            examples = -(min(position + 1, count) * model.batch_examples // -count)
            assert memory(costs, work, examples) <= model.cluster.memory_bytes * (1 + 1e-9)


@given(linear_models(5, min_size=3), st.sampled_from([(1,), (1, 2, 4), (2,)]), COUNTS)
def test_alpas_total_improves_or_stays(model: CostModel, replicas: tuple[int, ...], count: int):
    search = ChainSearch(model, replicas, count)
    plain, divided = least_total(search), least_total(search, intra_operator=True)
    if plain is not None:
        assert divided is not None
        assert divided.total_s <= plain.total_s * (1 + 1e-12)


@given(linear_models(5, min_size=3), st.integers(2, 4), COUNTS)
def test_with_slow_messages_all_divide_the_batch(model: CostModel, replicas: int, count: int):
    """A collective per micro-batch costs more than all computation; replication computes more and gains no message."""
    model = CostModel(model.graph, Cluster(devices=4, network=Network(latency_s=1e6)), model.batch_examples)
    found = fastest_splits(SplitModel(model, replicas, count), model.graph.order)
    assert found is not None
    assert "columns" not in found
    assert "rows" not in found


def test_wide_layers_of_few_examples_are_divided_by_columns_and_rows():
    """All-reduces of 4096 x 4096 weights take longer than those of the activations of 64 examples."""
    graph = towers(1, 4)
    network = Network(bandwidth_bytes_per_s=100e9, latency_s=1e-6)
    model = CostModel(graph, Cluster(devices=4, network=network), 64)
    found = fastest_splits(SplitModel(model, 4, 1), graph.order)
    assert found is not None
    assert {"columns", "rows"} <= set(found)
    slow = CostModel(graph, replace(model.cluster, network=Network(bandwidth_bytes_per_s=1e9, latency_s=1.0)), 64)
    by_batch = fastest_splits(SplitModel(slow, 4, 1), graph.order)
    assert by_batch is not None
    assert is_batch(by_batch)


def test_divided_weights_fit_where_whole_ones_do_not():
    graph = towers(1, 4)
    weights = sum(operator.param_bytes for operator in graph.operators)
    model = CostModel(graph, Cluster(devices=4, memory_bytes=2 * weights), 64)
    assert least_total(ChainSearch(model, (4,), 4)) is None
    found = least_total(ChainSearch(model, (4,), 4), intra_operator=True)
    assert found is not None
    (stage,) = found.layout
    assert {"columns", "rows"} & set(stage.splits)


def test_many_live_tensors_keep_the_way_by_examples():
    """9 states of 3 to the power of 8: not proven to be the fastest, but not slower than all by batch."""
    graph = towers(8, 2)
    model = CostModel(graph, Cluster(devices=4, network=Network(bandwidth_bytes_per_s=12.5e9, latency_s=1e-5)), 4096)
    costs = SplitModel(model, 4, 8)
    found = fastest_splits(costs, graph.order)
    assert found is not None
    by_batch = seconds(costs, costs.stage(graph.everything, ()))
    assert seconds(costs, costs.stage(graph.everything, found)) <= by_batch * (1 + 1e-12)
