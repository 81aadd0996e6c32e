from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bagpipe.config.dense_section import DenseConfig
from bagpipe.config.load import parse_config
from bagpipe.config.pipeline_plan import planned_step_s, with_plan
from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError
from bagpipe.partition.plan_file import PlanFile
from tests.partition.test_plan_file import PLAN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.to_toml(), encoding="utf-8")
    return file


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_plan_gives_its_values(path: Path, encoding: str) -> None:
    path.write_text(PLAN.to_toml(), encoding=encoding)
    config = parse_config(["--pipeline.plan", str(path), "--data.format", "synthetic"], "trainer").config
    assert config.pipeline == PipelineConfig(
        plan=str(path),
        schedule="graph",
        stages=2,
        microbatches=4,
        stage_microbatches="4,2",
        partition="dense_arch=0,inter_arch=0,over_arch=1",
        replicas="2,1",
    )
    assert config.pipeline.stage_replicas == (2, 1)
    assert config.pipeline.micro_per_stage == (4, 2)


def test_an_even_plan_says_less(path: Path) -> None:
    text = PLAN.to_toml().replace("replicas = 2", "replicas = 1").replace("[0, 1]", "[0]").replace("[2]", "[1]")
    path.write_text(text.replace("microbatches = 4", "microbatches = 2"), encoding="utf-8")
    found, _ = with_plan(PipelineConfig(plan=str(path)), DenseConfig())
    assert (found.replicas, found.stage_microbatches, found.microbatches) == ("", "", 2)
    assert PlanFile.from_toml(path.read_text(encoding="utf-8"), source="x").replicas == (1, 1)


def test_recomputation_sharding_and_budget_come_from_the_plan(path: Path) -> None:
    plan = replace(
        PLAN,
        stages=(replace(PLAN.stages[0], recompute=0.25), PLAN.stages[1]),
        shard="optimizer",
        budget_bytes=1 << 30,
    )
    path.write_text(plan.to_toml(), encoding="utf-8")
    pipeline, dense = with_plan(PipelineConfig(plan=str(path)), DenseConfig())
    assert (pipeline.recompute, pipeline.recompute_share) == (True, "0.25,0")
    assert dense == DenseConfig(shard="optimizer", budget_bytes=1 << 30)
    with pytest.raises(InputError, match=r"pipeline\.recompute True is not possible with pipeline\.plan"):
        with_plan(PipelineConfig(plan=str(path), recompute=True), DenseConfig())
    with pytest.raises(InputError, match=r"dense\.shard gradients is not possible with pipeline\.plan"):
        with_plan(PipelineConfig(plan=str(path)), DenseConfig(shard="gradients"))


@pytest.mark.parametrize("count", [3, 6, 64, 128, 250])
def test_no_share_loses_a_micro_batch(path: Path, count: int) -> None:
    for micro in range(count + 1):
        share = micro / count
        path.write_text(replace(PLAN, stages=(replace(PLAN.stages[0], recompute=share), PLAN.stages[1])).to_toml())
        text = with_plan(PipelineConfig(plan=str(path)), DenseConfig())[0].recompute_share
        assert not micro or float(text.split(",")[0]) == share


def test_the_predicted_step(path: Path) -> None:
    assert planned_step_s(PipelineConfig(plan=str(path))) is None
    path.write_text(replace(PLAN, step_s=0.0125).to_toml(), encoding="utf-8")
    assert planned_step_s(PipelineConfig(plan=str(path))) == 0.0125
    assert planned_step_s(PipelineConfig()) is None
    path.unlink()
    assert planned_step_s(PipelineConfig(plan=str(path))) is None


def test_a_plan_without_them_leaves_them_to_the_keys(path: Path) -> None:
    given = PipelineConfig(plan=str(path), recompute=True)
    pipeline, dense = with_plan(given, DenseConfig(shard="gradients"))
    assert (pipeline.recompute, dense.shard) == (True, "gradients")


def test_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"pipeline.stages 2 is not possible with pipeline.plan, which says it"):
        with_plan(PipelineConfig(plan=str(path), stages=2), DenseConfig())
    with pytest.raises(InputError, match=r"pipeline.plan: cannot read none.toml: No such file"):
        with_plan(PipelineConfig(plan="none.toml"), DenseConfig())
    path.write_text(PLAN.to_toml().replace('"batch"', '"features"', 1), encoding="utf-8")
    with pytest.raises(InputError, match="stage 0: layout: ranks divide examples: expected 'batch', got 'features'"):
        with_plan(PipelineConfig(plan=str(path)), DenseConfig())
