"""Autocast and hooks of the dense optimizer: steps equal those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import bagpipe
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.small import FEATURES, Plain, Small, assert_same, batches, pipeline, state_of

#: Around a step, as torch recommends around a forward: the weights it has cast are dropped where the block ends.
Around = Callable[[], AbstractContextManager[Any]]


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Casting(Small):
    """Autocast is the model's."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        with _autocast():
            return super().forward(batch)


def _trained(model: Small, around: Around, **more: Any) -> tuple[dict[str, Tensor], Tensor]:
    with pipeline(model, **more) as trained:
        iterator, losses = iter(batches(8)), []
        for _ in range(8):
            with around():
                trained.progress(iterator)
            assert trained.loss is not None
            losses.append(trained.loss)
        return state_of(trained), torch.stack(losses)


@pytest.mark.parametrize(("model", "around"), [(Small, _autocast), (Casting, nullcontext)])
def test_autocast_computes_what_it_does_in_a_plain_loop(model: type[Small], around: Around) -> None:
    state, losses = _trained(model(), around)
    direct, direct_losses = _trained(model(), around, cache_rows=0)
    assert_same(state, direct)
    assert torch.equal(losses, direct_losses)
    plain = Plain()
    for name in FEATURES:
        plain.tables[name].float()
    loop = PlainLoop(plain)
    for batch, loss in zip(batches(8), losses, strict=True):
        loop.zero_grad()
        with _autocast():
            expected, scores = loop.model(batch)
        assert scores.dtype == torch.bfloat16
        expected.backward()
        loop.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-6)
    assert_close(state, loop.state(), atol=1e-6)


def _clipped(**more: Any) -> tuple[dict[str, Tensor], list[float]]:
    norms: list[float] = []
    with pipeline(Small().double(), **more) as trained:
        trained.optimizer.register_step_pre_hook(
            lambda *_: norms.append(float(torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 0.1)))
        )
        list(trained.train(batches(8, dtype=torch.float64)))
        return state_of(trained), norms


def test_a_hook_before_the_step_clips_as_in_a_plain_loop() -> None:
    state, norms = _clipped()
    direct, direct_norms = _clipped(cache_rows=0)
    assert_same(state, direct)
    assert norms == direct_norms
    loop, expected = PlainLoop(), []
    for batch in batches(8, dtype=torch.float64):
        loop.zero_grad()
        loop.model(batch)[0].backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(loop.model.over.parameters(), 0.1)))
        loop.step()
    assert max(expected) > 0.1
    assert norms == pytest.approx(expected, rel=0, abs=1e-12)
    assert_close(state, loop.state())


def test_a_hook_after_the_step_may_set_the_rates_of_the_next() -> None:
    rates: list[float] = []
    row_rate = {"rate": 0.05}
    with pipeline(rows=bagpipe.optim.SGD(lambda step: row_rate["rate"])) as trained:

        def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.param_groups[0]["lr"] /= 2
            row_rate["rate"] /= 2

        trained.optimizer.register_step_post_hook(halve)
        list(trained.train(batches(3)))
    assert rates == [0.01, 0.005, 0.0025]
