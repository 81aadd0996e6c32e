from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.operators import Cost, Linear, Operator, OperatorGraph
from bagpipe.partition.predict import micro_seconds, predict
from bagpipe.partition.splits import CHANGES, SPLITS, SplitModel, Work, bottleneck, is_batch, split_names
from tests.partition.graphs import linear_models


def layer(name: str, **divisions: bool) -> Operator:
    """A layer of 100 x 100 in float32 with its bias, measured at 10 + n seconds forward and twice that backward."""
    return Operator(
        name=name,
        forward=Cost(fixed_s=10, per_example_s=1),
        backward=Cost(fixed_s=20, per_example_s=2),
        param_bytes=40400,
        activation_bytes=400,
        output_bytes=400,
        linear=Linear(weight_bytes=40000, input_bytes=400, output_bytes=400, **divisions),
    )


#: Megatron's block of two layers behind another one; 4 devices, 16 examples in 2 micro-batches, 100 bytes per second.
CHAIN = OperatorGraph(operators=(layer("a"), layer("b"), layer("c")), edges=(("a", "b"), ("b", "c")))
MODEL = CostModel(CHAIN, Cluster(devices=4, network=Network(bandwidth_bytes_per_s=100.0, latency_s=0.5)), 16)
COSTS = SplitModel(MODEL, 4, 2)
TENSOR = 8 * 400
ALL_REDUCE_S = 2 * 3 / 4 * TENSOR / 100 + 6 * 0.5
ALL_GATHER_S = 3 / 4 * TENSOR / 100 + 3 * 0.5
ALL_TO_ALL_S = 3 / 16 * TENSOR / 100 + 3 * 0.5


def work_of(*splits: str) -> Work:
    return COSTS.stage(CHAIN.everything, splits)


def test_by_examples_there_are_no_collectives_in_a_micro_batch():
    assert (
        work_of("batch", "batch", "batch")
        == work_of()
        == Work(
            forward_s=3 * 12, backward_s=3 * 24, synced_bytes=3 * 40400, weight_bytes=3 * 40400, activation_bytes=300
        )
    )


def test_columns_and_rows_need_one_all_reduce_each_way():
    """Whole micro-batches with a quarter of the arithmetic; the row layer's bias is whole on each device."""
    work = work_of("replicated", "columns", "rows")
    # The output leaves the stage by examples, so its gradient is gathered.
    assert work.forward_s == pytest.approx(18 + 12 + 12 + ALL_REDUCE_S)
    assert work.backward_s == pytest.approx(36 + 24 + 24 + ALL_REDUCE_S + ALL_GATHER_S)
    assert work.synced_bytes == 0
    assert work.weight_bytes == pytest.approx(40400 + 10100 + 10400)
    assert work.activation_bytes == 400 + 100 + 400


@pytest.mark.parametrize(
    ("splits", "forward_s", "backward_s", "kept_bytes"),
    [
        (("batch", "replicated", "batch"), ALL_GATHER_S, ALL_GATHER_S, 100 + 400 + 400 + 100),
        (("columns", "batch", "batch"), 2 * ALL_TO_ALL_S - ALL_TO_ALL_S, ALL_REDUCE_S + ALL_TO_ALL_S, 400),
        (("batch", "rows", "batch"), ALL_TO_ALL_S + ALL_REDUCE_S, ALL_TO_ALL_S + ALL_GATHER_S, 100 + 100 + 400 + 100),
        (("batch", "batch", "columns"), ALL_GATHER_S + ALL_TO_ALL_S, ALL_REDUCE_S + ALL_TO_ALL_S, 800),
    ],
)
def test_changes_of_layout(splits: tuple[str, ...], forward_s: float, backward_s: float, kept_bytes: float):
    work = work_of(*splits)
    calls = [10 + (8 if name == "replicated" else 2) for name in splits]
    assert work.forward_s - sum(calls) == pytest.approx(forward_s)
    assert work.backward_s - 2 * sum(calls) == pytest.approx(backward_s)
    assert work.activation_bytes == pytest.approx(kept_bytes)


def test_what_enters_from_outside_is_divided_by_examples():
    one = Operator(name="a", forward=Cost(), backward=Cost(), entering_bytes=400)
    model = CostModel(OperatorGraph(operators=(one,)), MODEL.cluster, 16)
    work = SplitModel(model, 4, 2).operator(0, "replicated")
    assert (work.forward_s, work.backward_s) == (pytest.approx(ALL_GATHER_S), 0)
    assert work.activation_bytes == 400


def test_the_splits_that_an_operator_has():
    plain = Operator(name="a", forward=Cost(), backward=Cost())
    assert split_names(plain, 2) == ("batch", "replicated")
    assert split_names(layer("a"), 2) == tuple(SPLITS)
    assert split_names(layer("a", rows=False), 2) == ("batch", "replicated", "columns")
    assert split_names(layer("a"), 1) == ("batch",), "on one device they are all the same"
    assert is_batch(())
    assert not is_batch(("batch", "rows"))


def test_every_layout_can_change_into_every_other():
    layouts = {layout for split in SPLITS.values() for layout in (split.takes, split.gives)}
    assert set(CHANGES) == {(one, other) for one in layouts for other in layouts if one != other}


@given(linear_models(5), st.integers(1, 4), st.sampled_from([1, 4]))
def test_by_examples_costs_are_those_of_the_cost_model(model: CostModel, replicas: int, count: int):
    everything = model.graph.everything
    totals, costs = model.totals(everything), SplitModel(model, replicas, count)
    work = costs.stage(everything, ())
    expected = model.time_per_example(totals, replicas, count)
    assert costs.time_per_example(work, totals.transfer_bytes) == pytest.approx(expected, rel=1e-9)
    assert work.weight_bytes == pytest.approx(totals.param_bytes)
    assert work.activation_bytes * replicas == pytest.approx(totals.activation_bytes)
    seconds = micro_seconds(model, Placed(everything, replicas, count), range(replicas))
    assert seconds == pytest.approx((work.forward_s, work.backward_s))


def test_a_simulated_step_has_the_collectives():
    stage = Placed(CHAIN.everything, 4, 2, ("replicated", "columns", "rows"))
    work = work_of(*stage.splits)
    predicted = predict(MODEL, (stage,))
    # Without divided batches there is nothing to all-reduce but a message of 0 bytes.
    assert predicted.step_s == pytest.approx(2 * (work.forward_s + work.backward_s) + 6 * 0.5)
    assert predicted.memory_bytes == (pytest.approx(3 * work.weight_bytes + 8 * work.activation_bytes),)
    assert bottleneck(MODEL, (stage,)) == pytest.approx(predicted.step_s / 16)
