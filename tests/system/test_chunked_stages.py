"""Pipelined jobs with a byte budget for the dense part give the bits of jobs without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
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
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[PoisonedArena]:
    """Those that are made, in order."""
    made: list[PoisonedArena] = []

    def make(*arguments: Any, **settings: Any) -> PoisonedArena:
        made.append(PoisonedArena(*arguments, **settings))
        return made[-1]

    monkeypatch.setattr(chunked_model, "Arena", make)
    return made


def same(config: Config, arenas: list[PoisonedArena], world_size: int = 1) -> None:
    """The least budget changes no bit, and holds on all ranks together."""
    plain, found, budget = run_staged(config, world_size), None, smallest(config, world_size)
    while found is None:
        arenas.clear()
        try:
            found = run_staged(change(config, dense__budget_bytes=budget), world_size)
        except InputError as error:  # of another rank, which has other segments
            budget = int(str(error).split("at least ")[1].split(",")[0])
    assert found.digests == plain.digests
    assert 0 < sum(arena.peak_bytes for arena in arenas) <= world_size * budget


def resumes(config: Config, folder: Path, world_size: int = 1) -> None:
    """Killed and resumed, with the least budget, without one, and with state on the host."""
    whole, budget = run_staged(config, world_size), smallest(config, world_size)
    job = recorded(change(config, dense__budget_bytes=budget), folder, every=2, world_size=world_size)
    for settings in ({"dense__budget_bytes": 0}, {"dense__state": "host"}):
        with pytest.raises(Crash):
            job.run(crash_at=6)
        job.config = change(config, **settings)
    end = job.run()
    assert end.first_batch > 0
    assert end.digests == whole.digests


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


# ---- beside other ways to hold and run stages ------------------------------------------------------------------------

PARTIAL = {"pipeline__backward_shares": "0.5,1", "optim__dense": "adam"}


@pytest.mark.parametrize(
    ("schedule", "world_size", "values"),
    [
        ("zb-h1", 1, {"run__loss_scale": 8.0, "optim__ema_decay": 0.9}),
        ("chimera", 2, {}),
        pytest.param("gpipe", 2, {"pipeline__backward_unit": "rank"}, marks=pytest.mark.slow),
        pytest.param("1f1b", 4, {"pipeline__backward_unit": "rank"}, marks=pytest.mark.slow),
        pytest.param("1f1b", 2, {"pipeline__processes": "1"}, marks=pytest.mark.slow),
    ],
)
def test_backwards_that_are_left_out_give_no_gradient(
    clicks: MakeConfig, arenas: list[PoisonedArena], schedule: str, world_size: int, values: dict[str, object]
) -> None:
    """Stages without a gradient of a batch, and factors of the others; also where ranks sum them."""
    same(job(clicks, schedule, "dlrm", **PARTIAL, **values), arenas, world_size)


def test_partial_backwards_resume(clicks: MakeConfig, tmp_path: Path) -> None:
    resumes(job(clicks, "1f1b", "dlrm", **PARTIAL, data__limit=168), tmp_path)


#: Versions kept, at all stages, predicted in forwards and in backwards, by the last gradient, in turns; recomputed.
ASYNCHRONOUS: list[tuple[str, str, int, dict[str, object]]] = [
    ("pipedream-2bw", "dlrm", 1, {"optim__dense": "adam"}),
    ("pipedream", "dcnv2", 2, {"optim__dense": "adam", "pipeline__recompute": True, "run__dtype": "float64"}),
    ("pipedream-2bw", "dlrm", 4, {"optim__dense": "adam", "optim__clip_value": 1e-3}),
    ("pipedream-vertical", "towers", 1, {"optim__momentum": 0.9}),
    ("spectrain", "dlrm", 1, {"optim__dense": "adagrad", "optim__ema_decay": 0.9}),
    ("spectrain", "dlrm", 1, {"optim__dense": "sgd", "pipeline__rows_delay": 1, "pipeline__recompute": True}),
    ("spectrain-v2", "dlrm", 2, {"optim__dense": "adam", "pipeline__rows_delay": 1}),
    ("pipeoptim", "deepfm", 1, {"optim__dense": "adamw", "pipeline__prediction_offset": 1, "optim__momentum": 0.9}),
]


@pytest.mark.parametrize(
    ("schedule", "model", "world_size", "values"),
    some_of(ASYNCHRONOUS, {0, 1, 5, 6}),
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(ASYNCHRONOUS)],
)
def test_versions_of_weights_lie_in_chunks(
    clicks: MakeConfig,
    arenas: list[PoisonedArena],
    schedule: str,
    model: str,
    world_size: int,
    values: dict[str, object],
) -> None:
    same(change(job(clicks, schedule, model, **values), cache__rows=140), arenas, world_size)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("pipedream-2bw", {"optim__dense": "adam"}),
        pytest.param("spectrain", {"optim__dense": "adagrad"}, marks=pytest.mark.slow),
    ],
)
def test_versions_of_weights_resume(
    clicks: MakeConfig, tmp_path: Path, schedule: str, values: dict[str, object]
) -> None:
    resumes(change(job(clicks, schedule, "dlrm", **values, data__limit=168), cache__rows=140), tmp_path)


@pytest.mark.parametrize(
    ("schedule", "world_size", "values"),
    [
        ("1f1b", 1, {"pipeline__recompute": True, "pipeline__recompute_share": "0.5"}),
        ("zb-v", 2, {"optim__dense": "adam"}),
        pytest.param("v-min", 1, {"optim__dense": "adam"}, marks=pytest.mark.slow),
        pytest.param("dynamic", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_activations_on_the_host_beside_a_budget(
    clicks: MakeConfig, arenas: list[PoisonedArena], schedule: str, world_size: int, values: dict[str, object]
) -> None:
    config = job(clicks, schedule, "dcnv2", **values)
    plain = run_staged(config, world_size)
    same(change(config, pipeline__activations="host"), arenas, world_size)
    budget = smallest(config, world_size)
    found = run_staged(change(config, pipeline__activations="host", dense__budget_bytes=budget), world_size)
    assert found.digests == plain.digests


def test_activations_on_the_host_beside_a_budget_resume(clicks: MakeConfig, tmp_path: Path) -> None:
    resumes(job(clicks, "1f1b", "dlrm", pipeline__activations="host", data__limit=168), tmp_path)


#: Schedule, level, ranks, and what varies besides. Two replicas, several stages on a rank, stages of two directions.
SHARDED: list[tuple[str, str, int, dict[str, object]]] = [
    ("1f1b", "gradients", 4, {"optim__dense": "adam", "run__dtype": "float64"}),
    ("chimera", "optimizer", 2, {"optim__dense": "adamw", "optim__weight_decay_exempt": ("1d",)}),
    ("breadth-first", "optimizer", 4, {"optim__momentum": 0.9, "pipeline__stages": 4, "pipeline__chunks": 2}),
    ("dynamic", "gradients", 4, {"optim__ema_decay": 0.9, "dense__wrap": ("*",)}),
    ("zb-h1", "gradients", 3, {"pipeline__replicas": "2,1", "optim__clip_value": 0.1}),
    ("1f1b", "parameters", 4, {"optim__dense": "adam", "pipeline__recompute": True}),
    ("chimera", "parameters", 2, {"optim__dense": "adamw", "optim__clip_value": 0.1}),
    ("interleaved", "parameters", 4, {"pipeline__stages": 4, "pipeline__chunks": 2}),
    ("zb-h1", "parameters", 4, {"optim__dense": "adam", "dense__wrap": ("*",)}),
    ("dynamic", "parameters", 4, {"optim__momentum": 0.9}),
]


@pytest.mark.parametrize(
    ("schedule", "level", "world_size", "values"),
    some_of(SHARDED, {1, 4, 5}),
    ids=[f"{name}-{level}" for name, level, *_ in SHARDED],
)
def test_stages_that_are_divided_among_ranks_have_budgets(
    clicks: MakeConfig,
    arenas: list[PoisonedArena],
    schedule: str,
    level: str,
    world_size: int,
    values: dict[str, object],
) -> None:
    same(job(clicks, schedule, "dlrm", dense__shard=level, **values), arenas, world_size)


def test_stages_that_are_divided_among_ranks_resume(clicks: MakeConfig, tmp_path: Path) -> None:
    resumes(job(clicks, "chimera", "dlrm", dense__shard="gradients", optim__dense="adam", data__limit=168), tmp_path, 2)


KFAC: dict[str, object] = {"optim__precondition": "kfac", "optim__kfac_damping": 0.1, "optim__kfac_inverse_every": 2}
#: What excludes nothing else: limits of the norm, batches that are left out, averages, beside all of the above.
TOGETHER: list[tuple[str, int, dict[str, object]]] = [
    ("1f1b", 2, {"optim__clip_norm": 0.02, "optim__clip_scope": "all", "optim__dense": "adam"}),
    ("chimera", 2, {"optim__clip_norm": 0.02, "dense__shard": "gradients", "optim__dense": "adam"}),
    ("1f1b", 4, {"optim__ema_decay": 0.9, "dense__shard": "parameters", "optim__dense": "adam"}),
    ("chimera", 2, {"run__nonfinite": "skip", "optim__ema_decay": 0.9, "dense__shard": "optimizer"}),
    ("chimera", 2, {**PARTIAL, "dense__shard": "optimizer", "optim__ema_decay": 0.9}),
    ("1f1b", 4, {**PARTIAL, "dense__shard": "parameters", "pipeline__backward_unit": "rank"}),
    ("spectrain", 2, {**PARTIAL, "optim__dense": "adagrad", "optim__clip_norm": 0.02}),
    ("spectrain-v2", 2, {"pipeline__activations": "host", "optim__dense": "adam", "pipeline__rows_delay": 1}),
    ("chimera", 2, {"pipeline__activations": "host", "optim__dense": "adam", "dense__shard": "parameters"}),
    ("dynamic", 2, PARTIAL),
    ("1f1b", 2, {**KFAC, "optim__dense": "adam", "run__nonfinite": "skip"}),
    ("chimera", 2, {**KFAC, "dense__shard": "gradients", "optim__dense": "adam"}),
    ("zb-h1", 4, {**KFAC, "dense__shard": "parameters", "optim__kfac_lag": 1}),
    ("pipedream", 2, {**KFAC, **PARTIAL, "optim__dense": "adam"}),
    ("zb-h1", 2, {"run__compile": True, "pipeline__activations": "host", "optim__dense": "adam"}),
    ("chimera", 2, {"run__compile": True, "dense__shard": "gradients", "optim__dense": "adam"}),
]


@pytest.mark.parametrize(
    ("schedule", "world_size", "values"),
    some_of(TOGETHER, {1, 4, 7, 10, 11}),
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(TOGETHER)],
)
def test_what_goes_with_a_budget_goes_together(
    clicks: MakeConfig,
    arenas: list[PoisonedArena],
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    world_size: int,
    values: dict[str, object],
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    same(change(job(clicks, schedule, "dlrm", **values), cache__rows=140), arenas, world_size)


@pytest.mark.slow
def test_a_free_order_with_replicas_keeps_its_bits(clicks: MakeConfig, arenas: list[PoisonedArena]) -> None:
    same(job(clicks, "dynamic", "dlrm", optim__dense="adam"), arenas, world_size=4)


def test_two_lanes_of_a_process_with_one_stage_are_refused(clicks: MakeConfig) -> None:
    config = staged(clicks("sum", "dlrm", limit=24), "chimera", 2, dense__budget_bytes=1 << 20)
    with pytest.raises(
        InputError, match=r"not possible with pipeline\.schedule chimera on 1 ranks: .* stage 0, .* use 2"
    ):
        run_job(config)
