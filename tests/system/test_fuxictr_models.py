"""The models from FuxiCTR with dropout and batch norm: the cache and a resume change no bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests
from trainer.assembly import build_training_model

#: Model -> other keys.
MODELS: dict[str, dict[str, Any]] = {
    "dcnv2-fuxictr": {"structure": "stacked", "cross_layers": 2},
    "deepfm-fuxictr": {},
    "finalmlp": {
        "bottom_mlp": (6, 4),
        "top_mlp": (8,),
        "heads": 2,
        "gate_mlp": (5,),
        "first_gate": "d1",
        "second_gate": "topic",
    },
}


def with_everything(config: Config, model: str) -> Config:
    keys = {f"model__{name}": value for name, value in MODELS[model].items()}
    return change(config, model__dropout=0.1, model__batch_norm=True, **keys)


@pytest.mark.parametrize(
    ("model", "schema"), some_of([(model, schema) for model in MODELS for schema in ("weighted", "mixed")], {0, 3, 4})
)
def test_the_cache_changes_no_bit(model: str, schema: str, clicks: Callable[..., Config]) -> None:
    config = with_everything(clicks(schema, model, "adam", eval_fraction=0.2), model)
    direct = run_job(change(config, cache__rows=0))
    cached = run_job(change(config, cache__rows=largest_batch(config), oracle__lookahead=8))
    assert (cached.digests, cached.losses, cached.auc) == (direct.digests, direct.losses, direct.auc)
    assert any("running_mean" in name for name in direct.dense)
    other = run_job(change(config, cache__rows=0, model__dropout=0.2))
    assert other.digests != direct.digests


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("model", some_of([*MODELS], {2}))
def test_a_killed_job_resumes(model: str, server: EmbeddedServer, tmp_path: Path) -> None:
    """Masks of the dropout and running statistics continue."""
    keys = {**MODELS[model], "name": model, "dropout": 0.1, "batch_norm": "true"}
    if "first_gate" in keys:
        keys |= {"first_gate": "I2,C1", "second_gate": "C3"}
    arguments = ["--cache.rows", "900"]  # a gate has rows of its own
    arguments += [
        text
        for name, value in keys.items()
        for text in (f"--model.{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    ]
    done = run_forked([*JOB, *arguments, "--result", str(tmp_path / "uninterrupted.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *arguments])
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert job.resumed_from() == 10
    assert digests(job.result) == digests(tmp_path / "uninterrupted.json")


@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_and_batch_norm_exclude_each_other(model: str, clicks: Callable[..., Config]) -> None:
    config = change(with_everything(clicks("sum", model), model), pipeline__microbatches=2)
    schema = run_job(change(config, pipeline__microbatches=1, cache__rows=0, run__steps=1)).built.data
    with pytest.raises(InputError, match=r"microbatches must be 1 for a model whose examples depend on each other"):
        build_training_model(config, schema)


def test_a_batch_of_one_example_gets_one_line(clicks: Callable[..., Config]) -> None:
    config = change(clicks("sum", "deepfm-fuxictr", limit=13), model__batch_norm=True, cache__rows=0)
    with pytest.raises(InputError, match=r"model\.batch_norm: a rank needs at least 2 examples of every batch, got 1"):
        run_job(config)
