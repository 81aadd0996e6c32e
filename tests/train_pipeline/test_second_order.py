"""A `KfacOptimizer` in a pipeline equals one in a plain loop, with and without a cache, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bagpipe
from bagpipe.dense.precondition.kfac import KfacSettings
from bagpipe.errors import InputError
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of

NUM = 9
SETTINGS = KfacSettings(inverse_every=2, damping=0.1)


def second_order(**more: Any) -> bagpipe.TrainPipeline:
    model = Small().double()
    adam = torch.optim.Adam(model.over.parameters(), lr=0.01)
    return pipeline(model, **{"optimizer": bagpipe.KfacOptimizer(model, adam, settings=SETTINGS), **more})


def trained(**more: Any) -> dict[str, Tensor]:
    with second_order(**more) as opened:
        progress_all(opened, iter(batches(NUM, dtype=torch.float64)))
        return state_of(opened)


def test_steps_are_those_of_a_plain_loop() -> None:
    loop = PlainLoop()
    loop.dense = bagpipe.KfacOptimizer(loop.model, loop.dense, settings=SETTINGS)
    for batch in batches(NUM, dtype=torch.float64):
        loop.zero_grad()
        loop.model(batch)[0].backward()
        loop.step()
    found = trained()
    assert_same(found, trained(cache_rows=0))
    assert_close(found, loop.state())


def test_a_resumed_pipeline_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    data = batches(NUM, dtype=torch.float64)
    more = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    with second_order(**more) as first:
        progress_all(first, iter(data[:5]))
    with second_order(**more) as second:
        assert second.step == 5
        progress_all(second, iter(data[5:]))
        found = state_of(second)
    assert_same(found, trained())


def test_groups_of_micro_batches_are_refused() -> None:
    with second_order(accumulate=2) as opened, pytest.raises(InputError, match="must be 1 with a KfacOptimizer, got 2"):
        opened.progress(iter(batches(2, dtype=torch.float64)))
