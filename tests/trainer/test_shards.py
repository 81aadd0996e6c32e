"""A dense part is divided among at least two ranks, a stage among the ranks that hold it."""

from __future__ import annotations

import pytest

from bagpipe.config.dense_section import DenseConfig
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.step_program import step_program
from trainer.shards import check_holders, check_shards


def test_one_rank_is_refused() -> None:
    check_shards(DenseConfig(), 1)
    check_shards(DenseConfig(shard="optimizer"), 2)
    with pytest.raises(InputError, match=r"^dense.shard optimizer needs at least 2 ranks, got 1$"):
        check_shards(DenseConfig(shard="optimizer"), 1)


def test_stages_on_one_rank_each_are_refused() -> None:
    step = step_program(chain(2, 2), [(0, True)], "1f1b", num_processes=2)
    check_holders(DenseConfig(shard="gradients"), Mesh(step=step, world_size=4))
    check_holders(DenseConfig(), Mesh(step=step, world_size=2))
    expected = (
        r"^dense.shard gradients divides a stage among the ranks that hold it, so a stage must be on several: expected "
        r"2 or more times 2 ranks, or pipeline.replicas, got 2$"
    )
    with pytest.raises(InputError, match=expected):
        check_holders(DenseConfig(shard="gradients"), Mesh(step=step, world_size=2))
