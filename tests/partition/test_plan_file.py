from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.errors import InputError
from bagpipe.partition.cost import Cluster
from bagpipe.partition.plan import make_plan
from bagpipe.partition.plan_file import PlanFile, PlannedStage, plan_file
from tests.partition.graphs import towers

PLAN = PlanFile(
    schedule="graph",
    batch_size=64,
    stages=(
        PlannedStage(operators=("dense_arch", "inter_arch"), ranks=(0, 1), microbatches=4),
        PlannedStage(operators=("over_arch",), ranks=(2,), microbatches=2),
    ),
)


def test_a_file_reads_as_it_was_written() -> None:
    assert PlanFile.from_toml(PLAN.to_toml(), source="x") == PLAN
    assert PLAN.to_toml().splitlines()[-9:] == [
        "[[stages]]",
        "operators = [",
        '    "over_arch",',
        "]",
        "replicas = 1",
        "ranks = [2]",
        "microbatches = 2",
        'layout = "batch"',
        "recompute = 0.0",
    ]


def test_a_file_of_version_1_reads() -> None:
    """It has neither recomputation nor sharding."""
    new = ("shard = ", "budget_bytes = ", "step_s = ", "recompute = ")
    lines = [line for line in PLAN.to_toml().splitlines() if not line.startswith(new)]
    assert PlanFile.from_toml("\n".join(lines).replace("version = 2", "version = 1"), source="x") == PLAN


def test_recomputation_sharding_and_budget_are_kept() -> None:
    plan = replace(
        PLAN,
        stages=(replace(PLAN.stages[0], recompute=0.25), PLAN.stages[1]),
        shard="gradients",
        budget_bytes=1 << 20,
        step_s=0.0125,
    )
    assert PlanFile.from_toml(plan.to_toml(), source="x") == plan


def test_a_plan_with_other_replicas_for_each_stage() -> None:
    plan = make_plan(towers(3, 2), Cluster(devices=4), 256, replicas="each", microbatches=4)
    written = plan_file(plan.partition, 256)
    assert written.replicas == tuple(stage.replicas for stage in plan.partition.stages)
    assert [rank for stage in written.stages for rank in stage.ranks] == list(range(sum(written.replicas)))
    assert PlanFile.from_toml(written.to_toml(), source="x") == written


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("version = 2", "version = 3", "version: expected 1 or 2, got 3"),
        ("version = 2\n", "", "expected the key version, got none"),
        ("batch_size = 64", "batch = 64", "unknown key batch; expected version, schedule, batch_size, stages, shard, "),
        ('shard = "none"', 'shard = "all"', "shard: expected one of none, optimizer, gradients, parameters, got 'all'"),
        ("budget_bytes = 0", "budget_bytes = -1", "budget_bytes: expected at least 0, got -1"),
        ("step_s = 0.0", "step_s = inf", "step_s: expected at least 0, got inf"),
        ("recompute = 0.0", "recompute = 1.5", "stage 0: recompute: expected 0 to 1, got 1.5"),
        ("recompute = 0.0", 'recompute = "all"', "stage 0: recompute: expected a number, got 'all'"),
        ("batch_size = 64", "batch_size = true", "batch_size: expected a whole number, got True"),
        ("batch_size = 64", "batch_size = 0", "batch_size: expected at least 1, got 0"),
        ('"graph"', '"dag"', "schedule: expected one of 1f1b, "),
        ('"graph"', '"interleaved"', "schedule: expected one with one stage per rank, got 'interleaved'"),
        ('"graph"', '"chimera"', "schedule: expected one with one stage per rank, got 'chimera'"),
        (
            "ranks = [2]",
            "ranks = [3]",
            "stage 1: ranks: expected [2], the next after those of the stages before, got [3]",
        ),
        ("ranks = [0, 1]", "ranks = [0]", "stage 0: ranks: expected 2, as many as replicas, got [0]"),
        ("ranks = [2]", 'ranks = ["2"]', "stage 1: ranks: expected whole numbers, got ['2']"),
        ("microbatches = 2", "microbatches = 0", "stage 1: microbatches: expected at least 1, got 0"),
        ("microbatches = 2", 'microbatches = "2"', "stage 1: microbatches: expected a whole number, got '2'"),
        ('layout = "batch"', 'layout = "rows"', "stage 0: layout: ranks divide examples: expected 'batch', got 'rows'"),
        ('"over_arch"', '"dense_arch"', "stage 1: operator 'dense_arch' is in stage 0 already"),
        ('    "over_arch",\n', "", "stage 1: operators: expected at least one, got none"),
        ("version = 2", "version =", "not valid TOML: "),
    ],
)
def test_refused(before: str, after: str, line: str) -> None:
    text = PLAN.to_toml()
    assert before in text
    with pytest.raises(InputError) as refused:
        PlanFile.from_toml(text.replace(before, after, 1), source="plan.toml")
    assert str(refused.value).startswith(f"plan.toml: {line}")
    assert "\n" not in str(refused.value)


def test_a_plan_needs_stages() -> None:
    with pytest.raises(InputError, match="stages: expected at least one, got none"):
        PlanFile(schedule="graph", batch_size=1, stages=())
    with pytest.raises(InputError, match=r"plan.toml: stage 0: expected a table \[\[stages\]\], got 1"):
        PlanFile.from_toml('version = 1\nschedule = "graph"\nbatch_size = 1\nstages = [1]\n', source="plan.toml")
