"""Whole jobs with a byte budget for the dense part give the bits of jobs without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from bagpipe.config.model_section import Model
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.pipeline.trace import Trace
from tests.effort import some_of
from tests.system.jobs import JobOutcome, change, run_job
from tests.system.rank_threads import run_ranks
from tests.system.recording import Crash, recorded

MakeConfig = Callable[..., Config]

DEEP = {"model__top_mlp": (24,) * 12}


def smallest(config: Config, world_size: int = 1) -> int:
    """The least budget that a job accepts."""
    config = change(config, dense__budget_bytes=1)
    with pytest.raises(InputError, match=r"dense\.budget_bytes must be at least") as refused:
        run_job(config) if world_size == 1 else run_ranks(config, world_size)
    return int(str(refused.value).split("at least ")[1].split(",")[0])


def same(config: Config, **more: object) -> tuple[JobOutcome, JobOutcome]:
    plain, budgeted = run_job(config), run_job(change(config, **more))
    assert (budgeted.digests, budgeted.losses) == (plain.digests, plain.losses)
    return plain, budgeted


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_of_four_times_the_budget_trains_with_the_same_bits(clicks: MakeConfig, dtype: str) -> None:
    config = change(clicks(limit=125), **DEEP, optim__dense="adam", run__dtype=dtype)
    budget = smallest(config)
    plain, _ = same(config, dense__budget_bytes=budget)
    state = sum(value.nbytes for value in plain.dense.values()) * 4
    assert state >= 4 * budget


@pytest.mark.parametrize(
    "optim",
    [("sgd", 0.9), ("lamb", 0.0)]
    + [
        pytest.param(optim, marks=pytest.mark.slow)
        for optim in (("sgd", 0.0), ("adagrad", 0.0), ("adam", 0.0), ("adamw", 0.0))
    ],
    ids=str,
)
def test_every_optimizer_keeps_its_bits(clicks: MakeConfig, optim: tuple[str, float]) -> None:
    config = change(
        clicks(), **DEEP, optim__dense=optim[0], optim__momentum=optim[1], optim__weight_decay=0.01, run__steps=6
    )
    same(config, dense__budget_bytes=smallest(config))


@pytest.mark.parametrize("model", get_args(Model))
def test_every_model_keeps_its_bits(clicks: MakeConfig, model: str) -> None:
    schema = "tasks" if model in ("mmoe", "ple", "esmm") else "sum"
    config = change(clicks(schema, model), optim__dense="adam", run__steps=6)
    same(config, dense__budget_bytes=smallest(config))


def test_gradients_are_examined_limited_and_scaled_by_chunk(clicks: MakeConfig) -> None:
    config = change(clicks(limit=125), **DEEP, optim__clip_value=1e-3, run__loss_scale=1024, run__nonfinite="skip")
    same(config, dense__budget_bytes=smallest(config))


@pytest.mark.parametrize("scope", some_of(["dense", "rows", "all"], {2}))
def test_a_limit_of_the_norm_is_that_of_all_gradients(clicks: MakeConfig, scope: str) -> None:
    limits = {"optim__clip_norm": 0.05, "optim__clip_scope": scope, "optim__clip_value": 0.01}
    config = change(clicks(), **DEEP, **limits, run__loss_scale=8.0, run__steps=6)
    same(config, dense__budget_bytes=smallest(config))


def test_moves_are_traced_and_reported_and_the_copy_thread_ends(clicks: MakeConfig) -> None:
    config, trace = change(clicks(eval_fraction=0.2), **DEEP), Trace()
    budgeted = run_job(change(config, dense__budget_bytes=smallest(config)), trace=trace)
    lane = budgeted.trained.progress.lanes["chunks"]
    moves = [span for span in trace.spans() if span.lane == "chunks"]
    # The trace goes on in the evaluation.
    assert 0 < lane.num_bytes <= sum(int(span.category.split()[0]) for span in moves)
    assert {span.name.rstrip("0123456789") for span in moves} == {"CHUNK_IN", "CHUNK_OUT"}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bagpipe-chunks")]


def test_state_on_the_host_keeps_the_bits(clicks: MakeConfig) -> None:
    same(change(clicks(limit=125), **DEEP, optim__dense="adam"), dense__state="host")


@pytest.mark.parametrize("stages", [{}, {"pipeline__schedule": "1f1b", "pipeline__stages": 2}], ids=["whole", "stages"])
def test_held_out_examples_are_scored_by_averages_under_the_budget(
    clicks: MakeConfig, stages: dict[str, object]
) -> None:
    config = change(
        clicks(limit=125, eval_fraction=0.2), **DEEP, **stages, optim__ema_decay=0.9, optim__ema_evaluate=True
    )
    plain, budgeted = same(config, dense__budget_bytes=smallest(config))
    assert (budgeted.auc, budgeted.ne) == (plain.auc, plain.ne)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_keep_the_replicated_bits(clicks: MakeConfig, world_size: int) -> None:
    config = change(clicks(limit=125), **DEEP, optim__dense="adam")
    plain = run_ranks(config, world_size)
    budgeted = run_ranks(change(config, dense__budget_bytes=smallest(config)), world_size)
    assert (budgeted.dense_digest, budgeted.embedding_digest) == (plain.dense_digest, plain.embedding_digest)


KFAC: dict[str, object] = {"optim__precondition": "kfac", "optim__kfac_damping": 0.1, "optim__kfac_inverse_every": 2}


def test_preconditioned_gradients_are_stepped_with_by_chunk(clicks: MakeConfig) -> None:
    config = change(clicks(limit=125), **DEEP, **KFAC, optim__dense="adam", run__nonfinite="skip", run__loss_scale=8.0)
    same(config, dense__budget_bytes=smallest(config))


@pytest.mark.parametrize("level", some_of(["none", "gradients", "parameters"], {1}))
def test_ranks_keep_the_bits_of_preconditioned_gradients(clicks: MakeConfig, level: str) -> None:
    config = change(clicks(limit=125), **DEEP, **KFAC, optim__dense="adam", dense__shard=level)
    plain = run_ranks(config, 2)
    budgeted = run_ranks(change(config, dense__budget_bytes=smallest(config)), 2)
    assert budgeted.digests == plain.digests


def test_a_killed_job_resumes_under_another_budget(clicks: MakeConfig, tmp_path: Path) -> None:
    """Checkpoints hold parameters and state by name: with other chunks, and with none."""
    config = change(clicks(), **DEEP, optim__dense="adam")
    whole = run_job(config)
    budget = smallest(config)
    job = recorded(change(config, dense__budget_bytes=budget), tmp_path, every=3, by_hand={4, 8, 12})
    for settings in (
        {"dense__budget_bytes": 3 * budget, "dense__chunk_bytes": budget // 2},
        {"dense__budget_bytes": 0},
        {"dense__state": "host"},
    ):
        with pytest.raises(Crash):
            job.run(crash_at=7)
        assert not [thread for thread in threading.enumerate() if "chunks" in thread.name], "a lane that copies lives"
        job.config = change(config, **settings)
    end = job.run()
    assert end.first_batch >= 12
    assert end.digests == whole.digests


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"dense__chunk_bytes": 100, "dense__budget_bytes": 1 << 20},
            r"dense\.chunk_bytes must be at least 2304, the bytes of",
        ),
        ({"dense__budget_bytes": 4096}, r"dense.budget_bytes must be at least \d+, what the largest unit, .* needs"),
    ],
    ids=["chunk", "budget"],
)
def test_what_does_not_fit_is_refused_in_one_line(clicks: MakeConfig, settings: dict[str, object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        run_job(change(clicks(), **DEEP, **settings))
