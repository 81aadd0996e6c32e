from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from bagpipe.cluster.network import Network
from bagpipe.errors import InputError
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.partition.plan import make_plan
from bagpipe.partition.plan_file import plan_file
from bagpipe.partition.planners import PLANNERS
from bagpipe.schedule.registry import LINEAR_SCHEDULES
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import graph, models, towers

LINKED = Cluster(devices=8, memory_bytes=16e9, network=Network(bandwidth_bytes_per_s=12.5e9, latency_s=1e-5))


def test_towers_on_eight_devices():
    """Seven parallel branches beat one device and chains under any linear schedule."""
    plan = make_plan(towers(7, 4), LINKED, 4096)
    best = plan.partition
    assert not plan.one_device_wins
    assert plan.one_device is not None
    assert plan.speedup == pytest.approx(plan.one_device.step_s / best.step_s)
    assert plan.speedup is not None
    assert plan.speedup > 4
    assert max(best.graph.depths) == 2
    assert best.devices == 8
    steps = {other.name: other.partition.step_s for other in plan.alternatives}
    chains = {f"chain, {schedule}" for schedule in LINEAR_SCHEDULES}
    assert steps.keys() == {"data parallel", *chains, *PLANNERS} - {"piper"}, "too many downsets for piper"
    assert all(steps[name] > 1.05 * best.step_s for name in ("data parallel", *chains))
    assert best.planner == "graphpipe"
    assert steps["graphpipe"] == best.step_s
    assert plan.least_chain_bottleneck_s is not None
    assert plan.least_bottleneck_s <= plan.least_chain_bottleneck_s
    assert plan.least_bottleneck_s <= best.bottleneck_s


@given(models(6))
def test_nothing_else_is_faster(model: CostModel):
    """A chain's stages without its relays are a candidate, too."""
    try:
        plan = make_plan(model.graph, model.cluster, model.batch_examples)
    except InputError:
        return
    others = [other.partition for other in plan.alternatives] + ([plan.one_device] if plan.one_device else [])
    assert all(plan.partition.step_s <= other.step_s * (1 + 1e-9) for other in others)


def test_replicas_of_each_stage_do_not_hide_those_of_the_whole():
    """Two even stages have the same bottleneck as two replicas of both, but the longer step."""
    line = OperatorGraph(
        operators=tuple(
            Operator(name=name, forward=Cost(fixed_s=1e-5, per_example_s=1e-6), backward=Cost(per_example_s=2e-6))
            for name in "ab"
        ),
        edges=(("a", "b"),),
    )
    plan = make_plan(line, Cluster(devices=2), 16, replicas="each")
    assert plan.partition.step_s == pytest.approx(6.8e-5)
    assert [stage.replicas for stage in plan.partition.stages] == [2]


def test_stages_list_their_operators():
    plan = make_plan(towers(2, 2), LINKED, 1024, microbatches=8, replicas="none")
    names = [name for stage in plan.partition.stages for name in stage.operators]
    assert sorted(names) == sorted(operator.name for operator in towers(2, 2).operators)
    for stage, depth in zip(plan.partition.stages, plan.partition.graph.depths, strict=True):
        assert stage.microbatches == 8
        assert stage.replicas == 1
        assert stage.in_flight >= min(depth, 8)
        assert 0 < stage.memory_bytes <= LINKED.memory_bytes
    assert plan.partition.bottleneck_s == max(stage.time_per_example_s for stage in plan.partition.stages)


def test_small_work_stays_on_one_device():
    """If a hop takes longer than the whole step, one device wins, and the plan says so."""
    small = graph(["ab", "bc"], dict.fromkeys("abc", 1e-9))
    plan = make_plan(small, Cluster(devices=4, network=Network(latency_s=1e-3)), 64)
    assert plan.one_device_wins
    assert plan.partition == plan.one_device
    assert plan.speedup == 1


def test_work_that_does_not_fit_one_device():
    heavy = graph(["ab", "bc", "cd"], param_bytes=10)
    plan = make_plan(heavy, Cluster(devices=4, memory_bytes=70), 64)
    assert plan.one_device is None
    assert plan.speedup is None
    assert not plan.one_device_wins
    assert len(plan.partition.stages) >= 2


def test_replicas_alike_divide_the_devices():
    plan = make_plan(graph(["ab"], {"a": 1, "b": 1}), Cluster(devices=4), 64, replicas="same")
    assert len({stage.replicas for stage in plan.partition.stages}) == 1
    assert 4 % plan.partition.stages[0].replicas == 0


def test_replicas_of_each_stage():
    """3 : 1 over 4 devices: with 1 : 1 replicas the bottleneck is 3, with 3 : 1 it is 1, with one micro-batch size."""
    uneven = graph(["ab"], {"a": 3, "b": 1})
    each = make_plan(uneven, Cluster(devices=4), 64, replicas="each", microbatches=16)
    assert each.least_bottleneck_s == pytest.approx(1.0)
    none = make_plan(uneven, Cluster(devices=4), 64, replicas="none", microbatches=16)
    assert none.least_bottleneck_s == pytest.approx(3.0)


def test_mixed_sizes_serve_stages_with_and_without_overhead():
    """b has a fixed cost and needs few micro-batches; a needs much memory per example and many micro-batches."""
    operators = OperatorGraph(
        operators=(
            Operator(name="a", forward=Cost(per_example_s=1), backward=Cost(per_example_s=2), activation_bytes=2),
            Operator(name="b", forward=Cost(fixed_s=8, per_example_s=1), backward=Cost(), activation_bytes=0),
        ),
        edges=(("a", "b"),),
    )
    cluster = Cluster(devices=2, memory_bytes=2 * 16)
    mixed = make_plan(operators, cluster, 16, replicas="none", mixed_sizes=True)
    equal = make_plan(operators, cluster, 16, replicas="none")
    assert mixed.least_bottleneck_s <= equal.least_bottleneck_s
    assert mixed.partition.step_s <= equal.partition.step_s


@settings(max_examples=25)
@given(models(5))
def test_the_least_bottleneck_is_that_of_all_partitions(model: CostModel):
    expected = best_of_all(model, [1], [4])
    try:
        plan = make_plan(model.graph, model.cluster, model.batch_examples, microbatches=4, replicas="none")
    except InputError:
        assert expected is None
        return
    assert expected is not None
    assert plan.exact
    assert plan.least_bottleneck_s == pytest.approx(expected[0], rel=1e-9)
    assert plan.partition.bottleneck_s >= plan.least_bottleneck_s * (1 - 1e-9)
    if plan.one_device is not None:
        assert plan.partition.step_s <= plan.one_device.step_s


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_planner(planner: str):
    plan = make_plan(towers(2, 2), LINKED, 1024, planner=planner, microbatches=8, replicas="none")
    assert plan.partition.planner in (planner, "whole")
    assert not [other for other in plan.alternatives if other.name in PLANNERS]
    every = make_plan(towers(2, 2), LINKED, 1024, microbatches=8, replicas="none")
    assert every.partition.step_s <= plan.partition.step_s


def test_piper_says_that_a_graph_is_too_wide():
    with pytest.raises(InputError, match="planner piper: expected a graph of at most 300 downsets, got more"):
        make_plan(graph([], alone="abcdefghijkl"), Cluster(devices=2), 4, planner="piper")


def test_an_unknown_planner():
    with pytest.raises(InputError, match="planner must be one of auto, graphpipe, pipedream, alpa, piper, got 'magic'"):
        make_plan(graph(["ab"]), Cluster(devices=2), 4, planner="magic")


def test_activations_are_recomputed_where_they_do_not_fit():
    """Operators whose micro-batch keeps 16 bytes. In a chain the first stages keep more of them, and recompute more."""
    line = graph(["ab", "bc", "cd"], activation_bytes=4, output_bytes=1)
    tight = Cluster(devices=4, memory_bytes=24)
    plan = make_plan(line, tight, 16, microbatches=4, replicas="none", recompute=True)
    shares = [stage.recompute for stage in plan.partition.stages]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0
    assert all(stage.memory_bytes <= 24 for stage in plan.partition.stages)
    with pytest.raises(InputError, match="no partition over 4 devices"):
        make_plan(line, tight, 16, microbatches=4, replicas="none")
    enough = Cluster(devices=4, memory_bytes=64)
    plans = [make_plan(line, enough, 16, microbatches=4, replicas="none", recompute=each) for each in (False, True)]
    assert plans[0].partition == plans[1].partition


def test_too_little_memory_is_one_line_with_both_numbers():
    with pytest.raises(InputError, match=r"fits 20 bytes each; operator 'a' alone needs 30 with 1 examples") as error:
        make_plan(graph(["ab"], param_bytes=10), Cluster(devices=2, memory_bytes=20), 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("microbatches", [0, 5])
def test_micro_batches_are_1_to_the_batch(microbatches: int):
    with pytest.raises(InputError, match=f"microbatches must be 1 to 4, the examples of a batch, got {microbatches}"):
        make_plan(graph(["ab"]), Cluster(devices=2), 4, microbatches=microbatches)


def test_without_cost_everything_is_free():
    free = graph(["ab"], {"a": 0, "b": 0})
    plan = make_plan(free, Cluster(devices=2), 4)
    assert plan.one_device_wins
    assert plan.partition.step_s == 0
    assert plan.speedup is None


def test_divided_operators_shorten_a_step_of_few_examples():
    """Layers 4096 wide: their gradients take longer to all-reduce than the activations of 64 examples."""
    cluster = Cluster(devices=4, network=Network(bandwidth_bytes_per_s=100e9, latency_s=1e-6))
    plans = [make_plan(towers(1, 4), cluster, 64, intra_operator=divided) for divided in (False, True)]
    assert plans[1].partition.step_s < plans[0].partition.step_s
    assert plans[1].partition.planner == "alpa"
    splits = [name for stage in plans[1].summary()["stages"] for name in stage["splits"]]
    assert {"columns", "rows"} <= set(splits)
    assert {name for stage in plans[0].summary()["stages"] for name in stage["splits"]} == {"batch"}
    with pytest.raises(InputError, match="stage 0: jobs divide every operator by examples"):
        plan_file(plans[1].partition, 64)


@pytest.mark.parametrize(
    ("settings", "got"), [({"planner": "pipedream"}, "planner pipedream"), ({"recompute": True}, "recompute")]
)
def test_who_cannot_divide_operators(settings: dict[str, Any], got: str):
    with pytest.raises(InputError, match=f"with planner auto or alpa and without recompute, got {got}"):
        make_plan(towers(1, 4), Cluster(devices=2), 64, intra_operator=True, **settings)
