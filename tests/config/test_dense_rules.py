"""What chunks of the dense part do not go with is refused, in one line."""

from __future__ import annotations

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
        (
            Config(dense=BUDGET, pipeline=PipelineConfig(schedule="1f1b", stages=2, microbatches=4)),
            "dense.budget_bytes 4096 is not possible with stages or micro-batches (pipeline.schedule 1f1b, "
            "pipeline.microbatches 4)",
        ),
        (
            Config(dense=BUDGET, run=RunConfig(compile=True)),
            "dense.budget_bytes 4096 is not possible with run.compile: compiled code keeps the addresses of parameters",
        ),
        (
            Config(dense=BUDGET, optim=OptimConfig(clip_norm=1.0)),
            "dense.budget_bytes 4096 is not possible with optim.clip_norm 1: a norm needs all gradients at once",
        ),
        (
            Config(dense=DenseConfig(state="host"), optim=OptimConfig(ema_decay=0.5)),
            "dense.state host is not possible with optim.ema_decay 0.5: averages are outside of the budget",
        ),
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
