"""What chunks of the dense part, and its division among ranks, do not go with is refused, in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, DenseConfig, OptimConfig, PipelineConfig, RunConfig
from bagpipe.errors import InputError

BUDGET = DenseConfig(budget_bytes=4096)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            Config(dense=DenseConfig(chunk_bytes=512)),
            "dense.chunk_bytes 512 needs dense.budget_bytes, or dense.state host, got neither",
        ),
        (Config(dense=DenseConfig(budget_bytes=-1)), "dense.budget_bytes must be at least 0, got -1"),
        (Config(dense=BUDGET, pipeline=PipelineConfig(schedule="1f1b", stages=2, microbatches=4)), ""),
        (Config(dense=BUDGET, pipeline=PipelineConfig(schedule="pipedream-2bw", stages=2, microbatches=4)), ""),
        (Config(dense=BUDGET, pipeline=PipelineConfig(schedule="1f1b", stages=2, activations="host")), ""),
        (Config(dense=BUDGET, run=RunConfig(verify=2), pipeline=PipelineConfig(schedule="1f1b", stages=2)), ""),
        (Config(dense=DenseConfig(budget_bytes=4096, shard="parameters")), ""),
        (
            Config(dense=BUDGET, run=RunConfig(cuda_graph=True)),
            "dense.budget_bytes 4096 is not possible with run.cuda_graph: a captured graph keeps the addresses of "
            "parameters",
        ),
        (Config(dense=BUDGET, run=RunConfig(compile=True)), ""),
        (Config(dense=BUDGET, optim=OptimConfig(clip_norm=1.0)), ""),
        (Config(dense=DenseConfig(state="host"), optim=OptimConfig(ema_decay=0.5)), ""),
        (
            Config(dense=DenseConfig(state="host"), optim=OptimConfig(dense="sgd")),
            "dense.state host needs an optimizer that keeps state, got optim.dense sgd with optim.momentum 0",
        ),
        (Config(dense=DenseConfig(budget_bytes=4096, chunk_bytes=512, state="host")), ""),
        (Config(dense=BUDGET, optim=OptimConfig(dense="sgd")), ""),
    ],
)
def test_chunks_of_the_dense_part(config: Config, line: str) -> None:
    if not line:
        check_config(config)
        return
    with pytest.raises(InputError) as refused:
        check_config(config)
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"pipeline": {"schedule": "pipedream", "stages": 2}},
            "dense.shard parameters is not possible with pipeline.schedule pipedream, whose stages compute without a "
            "pause: each version of the whole weights stays on every rank that holds it; use gradients",
        ),
        (
            {"dense": {"shard": "optimizer", "state": "host"}, "optim": {"dense": "lamb"}},
            "dense.shard optimizer is not possible with dense.budget_bytes or dense.state host and optim.dense lamb, "
            "whose steps of a chunk would need norms of what other ranks have in other chunks: use none",
        ),
        (
            {"run": {"cuda_graph": True, "device": "cuda"}},
            "dense.shard parameters is not possible with run.cuda_graph: a captured graph keeps the addresses of "
            "parameters; use gradients",
        ),
        (
            {"dense": {"wrap": ("top*",)}},
            "dense.wrap top* needs dense.shard optimizer, gradients or parameters, got none",
        ),
    ],
)
def test_one_line_says_what_is_not_possible(values: dict[str, dict[str, Any]], line: str) -> None:
    sections = {"dense": {"shard": "parameters"}, **values}
    config = Config(**{name: dataclasses.replace(getattr(Config(), name), **keys) for name, keys in sections.items()})
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, format="synthetic"))
    with pytest.raises(InputError) as refused:
        check_config(config)
    assert str(refused.value) == line


@pytest.mark.parametrize(
    "values",
    [
        {"optim": {"clip_value": 0.1}},
        {"optim": {"clip_norm": 1.0, "clip_scope": "all"}},
        {"optim": {"dense": "adagrad"}},
        {"optim": {"dense": "lamb"}},
        {"optim": {"ema_decay": 0.9}},
        {"run": {"compile": True}},
        {"pipeline": {"schedule": "1f1b", "stages": 2}, "run": {"verify": 3}},
        {"pipeline": {"schedule": "1f1b", "stages": 2, "microbatches": 4, "activations": "host"}},
        {"pipeline": {"schedule": "pipedream", "stages": 2}, "dense": {"shard": "gradients"}},
        {"pipeline": {"schedule": "pipeoptim", "stages": 2}, "dense": {"shard": "optimizer"}},
        {"run": {"cuda_graph": True, "device": "cuda"}, "dense": {"shard": "gradients"}},
    ],
)
def test_what_is_possible_with_divided_parameters(values: dict[str, dict[str, Any]]) -> None:
    base = Config()
    sections = {"dense": {"shard": "parameters"}, **values}
    check_config(
        dataclasses.replace(
            base,
            data=dataclasses.replace(base.data, format="synthetic"),
            **{name: dataclasses.replace(getattr(base, name), **keys) for name, keys in sections.items()},
        )
    )
