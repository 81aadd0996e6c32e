"""Stages of a job: their number, their holders, and refused combinations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor, nn

from bagpipe.config.sections import Config, ModelConfig, PipelineConfig, RunConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import build_model
from tests.trainer.schemas import schema_of
from trainer.stages import StagedJob, check_dynamic, has_losses, stage_model

DATA = schema_of(None, None, None, dense=2)
CONFIG = Config(model=ModelConfig(embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,)))


def job_of(world_size: int = 1, **pipeline: Any) -> StagedJob | None:
    config = dataclasses.replace(CONFIG, pipeline=PipelineConfig(**pipeline))
    return stage_model(convert(build_model(DATA, config.model), DATA).model, DATA, config, world_size)


def staged(world_size: int = 1, **pipeline: Any) -> StagedJob:
    job = job_of(world_size, **pipeline)
    assert job is not None
    return job


def test_a_model_is_whole_by_default() -> None:
    assert job_of() is None
    assert job_of(world_size=3) is None


def test_microbatches_alone_make_one_stage() -> None:
    job = staged(world_size=2, microbatches=4)
    assert len(job.staged.stages) == 1
    assert job.mesh.num_replicas == 2
    assert job.mesh.step.graph.microbatches == 4


@pytest.mark.parametrize(
    ("world_size", "processes", "replicas"),
    [(1, 1, 1), (2, 2, 1), (6, 2, 3)],
)
def test_one_process_runs_all_lanes_and_several_one_each(world_size: int, processes: int, replicas: int) -> None:
    job = staged(world_size, schedule="zb-v", stages=4, microbatches=4)
    assert job.mesh.step.num_processes == processes
    assert job.mesh.num_replicas == replicas
    assert len(job.mesh.step.program.lanes) == 2 + (processes if replicas > 1 else 0), "ranks, and lanes of sums"


def test_chunks_are_the_schedules_own_unless_given() -> None:
    pipeline = {"schedule": "breadth-first", "stages": 4, "microbatches": 4}
    assert staged(2, **pipeline).mesh.step.num_processes == 2
    assert staged(4, **pipeline, chunks=1).mesh.step.num_processes == 4


def test_stages_by_name() -> None:
    job = staged(schedule="graph", stages=3, partition="over_arch=0,dense_arch=2,inter_arch=1")
    assert [stage.name for stage in job.staged.stages] == ["over_arch", "inter_arch", "dense_arch"]
    assert job.mesh.step.graph.edges == ((1, 0), (2, 1))


def test_stages_with_replicas_of_their_own() -> None:
    pipeline = {"schedule": "graph", "stages": 3, "microbatches": 4, "stage_microbatches": "4,2,1", "replicas": "2,1,1"}
    alone, together, twice = (staged(world_size, **pipeline) for world_size in (1, 4, 8))
    assert (alone.mesh.step.num_processes, together.mesh.step.num_processes) == (1, 4)
    assert [together.mesh.holders(stage) for stage in range(3)] == [(0, 1), (2,), (3,)]
    assert together.mesh.example_shares == (1, 0, 0, 0)
    assert [twice.mesh.holders(stage) for stage in range(3)] == [(0, 1, 4, 5), (2, 6), (3, 7)]
    assert together.mesh.step.graph.micro_per_batch == (4, 2, 1)
    assert [has_losses(together, rank) for rank in range(4)] == [False, False, False, True]
    shared = staged(3, schedule="1f1b", stages=2, microbatches=2, replicas="1,2")
    assert not any(has_losses(shared, rank) for rank in range(3))


@pytest.mark.parametrize(
    ("world_size", "pipeline", "line"),
    [
        (
            3,
            {"replicas": "2,2"},
            "1f1b with 2 stages runs on 4 pipeline ranks, so the job must have 1 rank or a multiple",
        ),
        (3, {}, "1f1b with 2 stages runs on 2 pipeline ranks, so the job must have 1 rank or a multiple of 2, got 3"),
        (1, {"stages": 50}, "pipeline.stages must be 1 to .*, got 50"),
        (1, {"partition": "dense_arch=0,dense_arch=1"}, "pipeline.partition names dense_arch twice"),
        (1, {"partition": "dense_arch=0,over_arch=2"}, r"must use the stages 0 to 1 \(pipeline.stages\), got \[0, 2\]"),
        (1, {"partition": "dense_arch=1,inter_arch=0"}, "1f1b: every edge must lead to a higher stage number, got 1-0"),
    ],
)
def test_incompatible_settings_are_refused(world_size: int, pipeline: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        job_of(world_size, **{"schedule": "1f1b", "stages": 2, "microbatches": 2, **pipeline})


class Centred(nn.Module):
    """A model that mixes examples, by a module or by a function."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm
        self.layer = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        values: Tensor = self.layer(dense)
        return values - values.mean(0) if self.norm is None else self.norm(values)


@pytest.mark.parametrize(("norm", "named"), [(nn.BatchNorm1d(1), "norm"), (None, ": sub")])
def test_a_model_that_mixes_examples_takes_whole_batches_only(norm: nn.Module | None, named: str) -> None:
    parts = PipelineConfig(schedule="1f1b", replicas="2")
    with pytest.raises(InputError, match=r"pipeline.replicas must be empty for a model whose examples depend on each"):
        stage_model(Centred(norm), DATA, dataclasses.replace(CONFIG, pipeline=parts), 2)

    def job(microbatches: int) -> StagedJob | None:
        pipeline = PipelineConfig(schedule="1f1b", microbatches=microbatches)
        return stage_model(Centred(norm), DATA, dataclasses.replace(CONFIG, pipeline=pipeline), 1)

    assert job(1) is not None
    with pytest.raises(InputError, match=rf"pipeline\.microbatches must be 1 .*{named}\), got 2"):
        job(2)


def test_ranks_on_devices_cannot_choose_their_order() -> None:
    config = Config(pipeline=PipelineConfig(schedule="dynamic", stages=2), run=RunConfig(device="cuda"))
    check_dynamic(config, 1)
    with pytest.raises(InputError, match=r"pipeline.schedule dynamic with 2 ranks needs run.device cpu: .* got cuda"):
        check_dynamic(config, 2)
