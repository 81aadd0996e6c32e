"""Jobs whose stages are divided among their replicas end with the bits of replicated ones, resumed on any level too."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.distributed.processes import run_ranks as run_rank_processes
from tests.effort import some_of
from tests.system.jobs import change
from tests.system.resumed import Resumed
from tests.system.staging import run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import run_to_the_end
from tests.system.test_resume_ranks import STAGES, config_of, dying_job, numbers
from tests.system.test_sharded_dense import dense_of

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
    ("1f1b", "optimizer", "dcnv2", (), {**KFAC, "optim__kfac_kappa": 0.001}),
    ("chimera", "gradients", "dlrm", (), {**KFAC, "optim__kfac_factors": "local", "optim__kfac_lag": 1}),
    ("zb-h1", "parameters", "dlrm", ("*",), {**KFAC, "run__loss_scale": 64}),
    ("breadth-first", "parameters", "deepfm", (), {**KFAC, "pipeline__stages": 4, "pipeline__chunks": 2}),
    ("1f1b", "parameters", "dlrm", (), {**KFAC, "pipeline__stages": 3, "pipeline__replicas": "1,2,1"}),
]


def job(clicks: MakeConfig, schedule: str, model: str, **values: object) -> Config:
    config = clicks("mixed" if model == "deepfm" else "mean", model, limit=64, eval_fraction=0.1)
    return change(staged(config, schedule, 2, pipeline__microbatches=4), cache__rows=60, **values)


@pytest.mark.parametrize(
    ("schedule", "level", "model", "wrap", "values"), some_of(JOBS, {0, 3, 6, 9, 11, 12, 13, 14, 15, 16})
)
def test_bits_do_not_depend_on_the_level(
    clicks: MakeConfig, schedule: str, level: str, model: str, wrap: tuple[str, ...], values: dict[str, object]
) -> None:
    config = job(clicks, schedule, model, **values)
    divided = run_staged(change(config, dense__shard=level, dense__wrap=wrap), 4)
    assert divided.digests == run_staged(config, 4).digests
    assert divided.loss_sum > 0


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("level", "other"), [("gradients", "optimizer"), ("parameters", "none"), ("none", "parameters")]
)
def test_killed_and_resumed_on_another_level(server: EmbeddedServer, tmp_path: Path, level: str, other: str) -> None:
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
