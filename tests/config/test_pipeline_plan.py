from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.pipeline_plan import with_plan
from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError
from bagpipe.partition.plan_file import PlanFile
from tests.partition.test_plan_file import PLAN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.to_toml(), encoding="utf-8")
    return file


def test_a_plan_gives_its_values(path: Path) -> None:
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
    found = with_plan(PipelineConfig(plan=str(path)))
    assert (found.replicas, found.stage_microbatches, found.microbatches) == ("", "", 2)
    assert PlanFile.from_toml(path.read_text(encoding="utf-8"), source="x").replicas == (1, 1)


def test_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"pipeline.stages 2 is not possible with pipeline.plan, which says it"):
        with_plan(PipelineConfig(plan=str(path), stages=2))
    with pytest.raises(InputError, match=r"pipeline.plan none.toml: \[Errno 2\] No such file"):
        with_plan(PipelineConfig(plan="none.toml"))
    path.write_text(PLAN.to_toml().replace('"batch"', '"features"', 1), encoding="utf-8")
    with pytest.raises(
        InputError, match="stage 0: layout: training divides examples among ranks: expected 'batch', got"
    ):
        with_plan(PipelineConfig(plan=str(path)))
