"""Pipelined jobs with a byte budget for the dense part give the bits of jobs without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.dense.chunks import chunked_model
from bagpipe.errors import InputError
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.dense.chunks.poison import PoisonedArena
from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.recording import Crash, recorded
from tests.system.staging import MODELS, run_staged, staged
from tests.system.test_chunked_dense import DEEP, smallest
from tests.system.test_exactness import MakeConfig

#: A chain, forwards of a stage together, several stages a rank, backwards in halves, a V of both, an order of its own;
#: and what varies besides.
JOBS: list[tuple[str, str, dict[str, object]]] = [
    ("1f1b", "dlrm", {"run__dtype": "float64", "optim__dense": "adam"}),
    ("breadth-first", "dcnv2", {"pipeline__stages": 4, "pipeline__chunks": 2, "optim__dense": "adamw"}),
    ("interleaved", "dlrm", {"optim__momentum": 0.9, "optim__clip_value": 1e-3}),
    ("zb-h1", "deepfm", {"optim__dense": "adam", "pipeline__recompute": True}),
    ("zb-v", "towers", {"optim__dense": "adagrad", "run__loss_scale": 8.0}),
    ("dynamic", "dlrm", {}),
]


def job(clicks: MakeConfig, schedule: str, model: str, **values: object) -> Config:
    config = clicks("mixed" if model == "deepfm" else "sum", model, limit=60)
    config = staged(config, schedule, 2, pipeline__microbatches=4, **DEEP)
    return change(config, cache__rows=60, **values)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_model, "Arena", PoisonedArena)


@pytest.mark.parametrize(("schedule", "model", "values"), some_of(JOBS, {0, 3, 5}), ids=[name for name, _, _ in JOBS])
def test_bits_do_not_depend_on_the_budget(
    clicks: MakeConfig, schedule: str, model: str, values: dict[str, object]
) -> None:
    config = job(clicks, schedule, model, **values)
    plain = run_staged(config)
    for world_size in (1, 2):
        budget = smallest(config, world_size)
        assert run_staged(change(config, dense__budget_bytes=budget), world_size).digests == plain.digests


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DENSE_SCHEDULES)), ids=DENSE_SCHEDULES.keys())
def test_every_schedule_and_model_keeps_its_bits(clicks: MakeConfig, number: int) -> None:
    """Each schedule with one of the models; two pipes on the ranks that they need."""
    schedule = [*DENSE_SCHEDULES][number]
    model, schema = MODELS[number % len(MODELS)]
    config = change(staged(clicks(schema, model, limit=60), schedule, 2), optim__dense="adam")
    world_size = 1 if DENSE_SCHEDULES[schedule].num_pipes == 1 else 2
    budget = smallest(config, world_size)
    found = run_staged(change(config, dense__budget_bytes=budget), world_size)
    assert found.digests == run_staged(config, world_size).digests


@pytest.mark.parametrize(
    ("schedule", "world_size", "values"),
    [
        pytest.param("1f1b", 4, {"optim__dense": "adam"}, marks=pytest.mark.slow),
        ("chimera", 2, {}),
        ("none", 2, {"optim__clip_norm": 0.05}),
        pytest.param(
            "zb-h1",
            3,
            {"pipeline__stages": 2, "pipeline__replicas": "2,1", "optim__dense": "adam"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_of_several_ranks_are_summed(
    clicks: MakeConfig, schedule: str, world_size: int, values: dict[str, object]
) -> None:
    """Replicas of a pipeline, a schedule of two pipes, micro-batches alone, a stage on ranks of its own number."""
    config = change(clicks("sum", "dlrm", limit=60), **DEEP, pipeline__microbatches=4)
    config = change(config if schedule == "none" else staged(config, schedule, 2), pipeline__microbatches=4, **values)
    budget = smallest(config, world_size)
    found = run_staged(change(config, dense__budget_bytes=budget), world_size)
    assert found.digests == run_staged(config, world_size).digests


def test_a_state_of_four_times_the_budget_trains_scores_and_shows_its_moves(clicks: MakeConfig) -> None:
    config = change(clicks("sum", "dcnv2", limit=60, eval_fraction=0.2), optim__dense="adam", model__top_mlp=(24,) * 40)
    config = change(staged(config, "1f1b", 2), pipeline__microbatches=4)
    budget = smallest(config)
    plain = run_job(config)
    found = run_job(change(config, dense__budget_bytes=budget))
    assert sum(value.nbytes for value in plain.dense.values()) * 4 >= 4 * budget
    assert (found.digests, found.auc, found.ne) == (plain.digests, plain.auc, plain.ne)
    lanes = found.trained.progress.lanes
    assert min(lanes[name].num_bytes for name in ("chunks0", "chunks1")) > 0


def test_a_killed_job_resumes_with_other_chunks_and_with_none(clicks: MakeConfig, tmp_path: Path) -> None:
    config = change(staged(clicks(limit=168), "1f1b", 2), **DEEP, pipeline__microbatches=4, optim__dense="adam")
    for world_size in (1, 2):
        whole = run_staged(config, world_size)
        budget = smallest(config, world_size)
        job = recorded(change(config, dense__budget_bytes=budget), tmp_path, every=2, world_size=world_size)
        for settings in (
            {"dense__budget_bytes": 3 * budget, "dense__chunk_bytes": 4096},
            {"dense__budget_bytes": 0},
            {"dense__state": "host"},
        ):
            with pytest.raises(Crash):
                job.run(crash_at=4)
            job.config = change(config, **settings)
        end = job.run()
        assert end.first_batch > 0
        assert end.digests == whole.digests


def test_two_lanes_of_a_process_with_one_stage_are_refused(clicks: MakeConfig) -> None:
    config = staged(clicks("sum", "dlrm", limit=24), "chimera", 2, dense__budget_bytes=1 << 20)
    with pytest.raises(
        InputError, match=r"not possible with pipeline\.schedule chimera on 1 ranks: .* stage 0, .* use 2"
    ):
        run_job(config)
