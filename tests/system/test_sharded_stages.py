"""Jobs whose stages are divided among their replicas end with the bits of replicated ones, resumed on any level too."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
from bagpipe.store.server.embedded import EmbeddedServer
from tests.distributed.processes import run_ranks as run_rank_processes
from tests.effort import some_of
from tests.system.jobs import change
from tests.system.recording import Crash, recorded
from tests.system.resumed import Resumed
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import run_to_the_end
from tests.system.test_resume_ranks import STAGES, config_of, dying_job, numbers
from tests.system.test_sharded_dense import EMA, dense_of

#: Rows that are read a batch late: forwards of a batch precede the steps of the batch before.
DELAYED: dict[str, object] = {"pipeline__rows_delay": 1, "cache__rows": 140}

LATE = ["--pipeline.schedule", "pipeoptim", "--pipeline.rows_delay", "1", "--cache.rows", "900"]

KFAC = {"optim__precondition": "kfac", "optim__kfac_inverse_every": 2}

#: Schedule, level, model, wrap rule, and what varies besides: dtypes, optimizers. Two replicas of two ranks each.
JOBS = [
    ("1f1b", "gradients", "dcnv2", (), {"run__dtype": "float64", "optim__dense": "adam"}),
    ("breadth-first", "optimizer", "dlrm", (), {"optim__dense": "adam", "pipeline__stages": 4, "pipeline__chunks": 2}),
    (
        "breadth-first",
        "gradients",
        "deepfm",
        (),
        {"optim__dense": "sgd", "optim__momentum": 0.9, "optim__clip_value": 0.1},
    ),
    ("chimera", "gradients", "deepfm", (), {"optim__dense": "adamw", "optim__weight_decay_exempt": ("1d",)}),
    ("dynamic", "gradients", "dlrm", ("*",), {}),
    ("1f1b", "parameters", "dcnv2", (), {"run__dtype": "float64", "optim__dense": "adam", "pipeline__recompute": True}),
    ("breadth-first", "parameters", "dlrm", (), {"optim__dense": "adam", "pipeline__stages": 6, "pipeline__chunks": 3}),
    ("interleaved", "parameters", "deepfm", (), {"pipeline__stages": 4, "pipeline__chunks": 2}),
    ("zb-h1", "parameters", "dlrm", ("*",), {"optim__dense": "adam"}),
    ("chimera", "parameters", "deepfm", (), {"optim__dense": "adamw", "optim__clip_value": 0.1}),
    ("dynamic", "parameters", "dcnv2", (), {"optim__dense": "sgd", "optim__momentum": 0.9}),
    ("zb-h1", "parameters", "dlrm", (), {"pipeline__stages": 3, "pipeline__replicas": "2,1,1"}),
    ("1f1b", "parameters", "dcnv2", (), {"optim__dense": "adam", "pipeline__activations": "host"}),
    ("chimera", "parameters", "dlrm", (), {"optim__dense": "sgd", "pipeline__activations": "host"}),
    ("zb-h1", "parameters", "deepfm", (), {"pipeline__activations": "host", "pipeline__recompute": True}),
    ("pipedream-2bw", "gradients", "dcnv2", (), {"optim__dense": "adam"}),
    ("pipedream", "optimizer", "deepfm", (), {"pipeline__recompute": True}),
    ("pipeoptim", "gradients", "dlrm", (), {"optim__dense": "adamw", "optim__weight_decay_exempt": ("1d",)}),
    ("spectrain", "optimizer", "dcnv2", ("*",), {"optim__dense": "sgd", "optim__momentum": 0.9}),
    (
        "spectrain-v2",
        "gradients",
        "dlrm",
        (),
        {"optim__dense": "sgd", "optim__schedule": "exponential", "optim__schedule_every": 3},
    ),
    ("pipeoptim", "optimizer", "dcnv2", (), {**DELAYED, "optim__dense": "adam", "optim__warmup_steps": 5}),
    ("spectrain", "gradients", "dlrm", (), {**DELAYED, "pipeline__recompute": True}),
    ("pipedream-2bw", "gradients", "deepfm", (), {**DELAYED, "optim__dense": "adam", "pipeline__processes": "1"}),
    ("1f1b", "optimizer", "dcnv2", (), {**KFAC, "optim__kfac_kappa": 0.001}),
    ("chimera", "gradients", "dlrm", (), {**KFAC, "optim__kfac_factors": "local", "optim__kfac_lag": 1}),
    ("zb-h1", "parameters", "dlrm", ("*",), {**KFAC, "run__loss_scale": 64}),
    ("breadth-first", "parameters", "deepfm", (), {**KFAC, "pipeline__stages": 4, "pipeline__chunks": 2}),
    ("1f1b", "parameters", "dlrm", (), {**KFAC, "pipeline__stages": 3, "pipeline__replicas": "1,2,1"}),
]


def job(clicks: MakeConfig, schedule: str, model: str, limit: int = 64, **values: object) -> Config:
    config = clicks("mixed" if model == "deepfm" else "mean", model, limit=limit, eval_fraction=0.1)
    return change(staged(config, schedule, 2, pipeline__microbatches=4), **{"cache__rows": 60, **values})


@pytest.mark.parametrize(
    ("schedule", "level", "model", "wrap", "values"),
    some_of(JOBS, {0, 3, 6, 9, 11, 12, 15, 17, 18, 20, 21, 23, 24, 25, 26, 27}),
)
def test_bits_do_not_depend_on_the_level(
    clicks: MakeConfig, schedule: str, level: str, model: str, wrap: tuple[str, ...], values: dict[str, object]
) -> None:
    config = job(clicks, schedule, model, **values)
    divided = run_staged(change(config, dense__shard=level, dense__wrap=wrap), 4)
    assert divided.digests == run_staged(config, 4).digests
    assert divided.loss_sum > 0


@pytest.mark.parametrize("level", some_of(["optimizer", "gradients", "parameters"], {2}))
def test_traced_code_reads_parameters_that_come_and_go(
    clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """What its backward needs of them is saved as places. A backend without generated code takes seconds."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = job(clicks, "1f1b", "dlrm", optim__dense="adam", run__compile=True)
    assert run_staged(change(config, dense__shard=level), 4).digests == run_staged(config, 4).digests


@pytest.mark.parametrize(
    ("schedule", "level", "values"),
    some_of(
        [
            ("1f1b", "optimizer", {}),
            ("breadth-first", "parameters", {"pipeline__stages": 4, "pipeline__chunks": 2}),
            ("chimera", "gradients", {"optim__weight_decay": 0.1}),
            ("pipedream", "gradients", {}),
        ],
        {1, 2},
    ),
)
def test_lamb_follows_the_norms_of_whole_tensors(
    clicks: MakeConfig, schedule: str, level: str, values: dict[str, object]
) -> None:
    """Its shares' squares are added in another order."""
    config = job(clicks, schedule, "dcnv2", run__dtype="float64", optim__dense="lamb", **values)
    divided = change(config, dense__shard=level)
    end = run_staged(divided, 4)
    assert_equal_numbers(end, run_staged(config, 4))
    assert run_staged(change(divided, cache__rows=0), 4).digests == end.digests


@pytest.mark.parametrize(
    ("schedule", "values"),
    some_of(
        [
            ("pipedream-2bw", {"optim__dense": "adam"}),
            ("pipeoptim", {"optim__dense": "adamw", "optim__ema_decay": 0.9}),
            ("spectrain", {"optim__dense": "sgd"}),
            ("spectrain-v2", {"optim__dense": "adagrad"}),
        ],
        {1, 3},
    ),
)
def test_a_killed_job_goes_on_with_its_versions(
    clicks: MakeConfig, tmp_path: Path, schedule: str, values: dict[str, object]
) -> None:
    """On another level. Lanes have made the checkpoint while they trained."""
    config = job(clicks, schedule, "dcnv2", 168, **values)
    plain = recorded(config, tmp_path, every=2, world_size=4)
    expected = plain.run()
    divided = recorded(change(config, dense__shard="gradients"), tmp_path, every=2, world_size=4)
    with pytest.raises(Crash):
        divided.run(crash_at=9)
    divided.config = change(config, dense__shard="optimizer")
    again = divided.run()
    assert again.first_batch > 0
    assert (again.digests, again.totals) == (expected.digests, expected.totals)


@pytest.mark.parametrize(
    ("level", "values"),
    [("parameters", {"optim__dense": "lamb"}), ("parameters", {"pipeline__activations": "host"})],
)
def test_a_killed_job_goes_on_with_its_shares(
    clicks: MakeConfig, tmp_path: Path, level: str, values: dict[str, object]
) -> None:
    config = change(job(clicks, "1f1b", "dcnv2", 168, **values), dense__shard=level)
    expected = recorded(config, tmp_path, every=2, world_size=4).run()
    killed = recorded(config, tmp_path, every=2, world_size=4)
    with pytest.raises(Crash):
        killed.run(crash_at=9)
    again = killed.run()
    assert again.first_batch > 0
    assert (again.digests, again.totals) == (expected.digests, expected.totals)


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("level", "other", "more"),
    [
        pytest.param("gradients", "optimizer", (), marks=pytest.mark.slow),
        pytest.param("parameters", "none", EMA, marks=pytest.mark.slow),
        pytest.param("none", "parameters", EMA, marks=pytest.mark.slow),
        pytest.param("gradients", "none", LATE, marks=pytest.mark.slow),
        ("optimizer", "gradients", [*LATE, *EMA]),
    ],
)
def test_killed_and_resumed_on_another_level(
    server: EmbeddedServer, tmp_path: Path, level: str, other: str, more: Sequence[str]
) -> None:
    """Four processes, two stages."""
    arguments = [
        "--store.url",
        server.url,
        *STAGES,
        "--optim.dense",
        "adam",
        "--data.limit",
        "1500",
        "--eval.every",
        "3",
        *more,
    ]
    plain = Resumed(folder=tmp_path / "plain", arguments=arguments)
    expected = numbers(run_to_the_end(config_of(plain.settings()), 4))
    job = Resumed(folder=tmp_path / "divided", arguments=arguments)
    config = change(config_of(job.settings("--dense.shard", level)), run__peer_timeout_s=20.0)
    ends = run_rank_processes(4, dying_job, config, "after-checkpoint-data:2")
    assert -signal.SIGKILL in [end.code for end in ends]
    results = run_to_the_end(config_of(job.settings("--dense.shard", other)), 4)
    assert numbers(results) == expected
    assert results[0]["resumed_from"] > 0
    assert dense_of(job.checkpoints).digest() == dense_of(plain.checkpoints).digest(), "exports read the same"
