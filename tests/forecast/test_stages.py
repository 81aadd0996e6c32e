"""Stages of a forecast: their step is that of the simulated schedule, with the closed forms as limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.forecast.forecast import forecast
from bagpipe.forecast.stages import StagedDense, staged_dense
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.schedule.registry import CHAIN_SCHEDULES
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import DENSE, job

OPERATORS = 8
FORWARD_S, BACKWARD_S = 1e-6, 2e-6


def graph(**changes: float) -> OperatorGraph:
    """A chain of equal operators, without traffic between them unless it is given."""
    names = [f"layer{number}" for number in range(OPERATORS)]
    forward, backward = Cost(per_example_s=FORWARD_S), Cost(per_example_s=BACKWARD_S)
    operators = tuple(Operator(name=name, forward=forward, backward=backward, **changes) for name in names)
    return OperatorGraph(operators=operators, edges=tuple(itertools.pairwise(names)))


def fast(ranks: int) -> ClusterModel:
    """Devices with links that take no time."""
    link = replace(cluster().links["net"], bytes_per_s=1e15, latency_s=0.0)
    return cluster(hosts(ranks, devices_per_host=1, port="net"), links={"local": link, "net": link})


def staged(where: ClusterModel, **changes: object) -> StagedDense:
    values = {"ranks": 4, "batch_examples": 1024, "stages": 4, "microbatches": 8, "schedule": "1f1b"}
    return staged_dense(graph(), where, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (4, 8), (8, 32)])
def test_equal_stages_have_the_bubble_of_the_closed_form(schedule: str, stages: int, microbatches: int) -> None:
    """(S - 1) / M of the busy time (Huang et al., 2019; Narayanan et al., 2019)."""
    found = staged(fast(stages), ranks=stages, stages=stages, microbatches=microbatches, schedule=schedule)
    busy_s = 1024 * OPERATORS / stages * (FORWARD_S + BACKWARD_S)
    assert found.step_s == pytest.approx(busy_s * (1 + (stages - 1) / microbatches), rel=1e-6)
    assert found.bubble == pytest.approx((stages - 1) / microbatches, rel=1e-6)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (8, 32)])
def test_zero_bubble_schedules_have_the_spans_of_the_closed_forms(stages: int, microbatches: int) -> None:
    """zb-h1 adds (P - 1)(F + I - W) to the busy time, zb-h2 (P - 1) F; here F = I = W (Qi et al., 2024)."""
    busy_s = 1024 * OPERATORS / stages * (FORWARD_S + BACKWARD_S)
    forward_s = busy_s / microbatches / 3
    for schedule in ("zb-h1", "zb-h2"):
        found = staged(fast(stages), ranks=stages, stages=stages, microbatches=microbatches, schedule=schedule)
        assert found.step_s == pytest.approx(busy_s + (stages - 1) * forward_s, rel=1e-6)


def test_one_stage_is_data_parallelism() -> None:
    found = staged(fast(4), stages=1, microbatches=1)
    assert found.replicas == 4
    assert found.step_s == pytest.approx(256 * OPERATORS * (FORWARD_S + BACKWARD_S), rel=1e-6)


def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_stages() -> None:
    where, big = fast(4), graph(activation_bytes=1e3)
    kept = {
        schedule: staged_dense(
            big, where, ranks=4, batch_examples=1024, stages=4, microbatches=16, schedule=schedule
        ).device_bytes
        for schedule in ("gpipe", "1f1b")
    }
    of_stage = OPERATORS / 4 * 1e3
    assert kept["gpipe"] == pytest.approx(1024 * of_stage)
    assert kept["1f1b"] == pytest.approx(4 / 16 * 1024 * of_stage)


def test_a_job_in_stages() -> None:
    """Its rows are read by the replicas; the pipeline stands for forward and backward."""
    where = fast(4)
    found = staged(where, stages=2)
    assert found.replicas == 2
    pipelined = forecast(where, job(ranks=4, staged=found))
    assert pipelined.op_s["F"] + pipelined.op_s["B"] >= found.step_s
    assert pipelined.step_s >= found.step_s
    assert set(pipelined.device_bytes) == {"stage", "cache", "staging"}
    with pytest.raises(InputError, match="ranks: expected 4, 2 stages times 2 replicas, got 2"):
        job(ranks=2, staged=found)
    with pytest.raises(InputError, match="shard: expected one of none, optimizer, gradients, parameters, got 'x'"):
        job(shard="x", dense=DENSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "zigzag"}, f"schedule: expected one of {', '.join(CHAIN_SCHEDULES)}, got 'zigzag'"),
        ({"stages": 3}, "stages: expected a divisor of the 4 ranks, got 3"),
        ({"microbatches": 2000}, "microbatches: expected at most 1024, the examples of a replica, got 2000"),
        ({"ranks": 16, "stages": 16}, "stages: expected at most 8, more are not faster, got 16"),
        ({"ranks": 40, "stages": 4}, "expected a cluster with 40 devices, got 16 of 'small'"),
    ],
)
def test_stages_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        staged(fast(16), **changes)
    assert str(caught.value) == message


def test_a_model_too_large_for_its_devices() -> None:
    with pytest.raises(InputError, match=r"stages: the dense part fits no 2 devices of 1.6e\+10 bytes"):
        staged_dense(
            graph(param_bytes=1e11), fast(2), ranks=2, batch_examples=64, stages=2, microbatches=2, schedule="1f1b"
        )
