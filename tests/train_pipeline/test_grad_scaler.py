"""A pipeline follows torch's GradScaler: the same scales, and the same steps, as a plain loop that calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

from bagpipe.dense.loss_scale import LossScale
from bagpipe.errors import InputError
from bagpipe.train_pipeline.grad_scaler import LARGEST, user_scaler
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.small import FEATURES, Plain, Small, assert_same, batches, pipeline, state_of

#: Batches with an infinite loss.
BAD = (3, 7, 8)


def _scaler(init_scale: float = 4.0, growth_interval: int = 2, **more: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, **more)


def _some_bad(num: int = 14) -> list[Any]:
    made = batches(num, dtype=torch.float64)
    for number in BAD:
        made[number]["labels"].fill_(float("inf"))
    return made


def _trained(scaler: GradScaler | None, data: list[Any], **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    """State, and the scale after each batch."""
    with pipeline(Small().double(), grad_scaler=scaler, **more) as trained:
        scales = [0.0 if scaler is None else scaler.get_scale() for _ in trained.train(data)]
        return state_of(trained), scales


def _in_a_plain_loop(loop: PlainLoop, scaler: GradScaler, data: list[Any], autocast: torch.dtype | None) -> list[float]:
    scales = []
    for batch in data:
        loop.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss, _ = loop.model(batch)
        scaler.scale(loss).backward()
        scaler.step(loop.dense)
        scaler.step(loop.rows)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_scales_and_steps_are_those_of_a_plain_loop() -> None:
    state, scales = _trained(_scaler(), _some_bad())
    direct, direct_scales = _trained(_scaler(), _some_bad(), cache_rows=0)
    assert_same(state, direct)
    loop = PlainLoop()
    expected = _in_a_plain_loop(loop, _scaler(), _some_bad(), None)
    assert scales == direct_scales == expected
    assert min(scales) < 4 < max(scales)
    assert_close(state, loop.state())


def test_a_scale_of_the_users_is_taken_at_the_next_batch() -> None:
    scaler, data = _scaler(), _some_bad()
    with pipeline(Small().double(), grad_scaler=scaler) as trained:
        for number, _ in enumerate(trained.train(data[:4])):
            if number == 1:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**20})
        assert scaler.get_scale() == 2.0**19
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})  # between two iterators
        list(trained.train(data[4:5]))
    assert scaler.get_scale() == 8


def test_gradients_are_unscaled_before_hooks() -> None:
    seen: dict[float, list[Tensor]] = {}
    for scale in (1.0, 1024.0):
        found = seen.setdefault(scale, [])
        with pipeline(Small().double(), grad_scaler=_scaler(scale)) as trained:
            weight = trained.model.over.weight  # type: ignore[union-attr]
            trained.optimizer.register_step_pre_hook(lambda *_, w=weight, f=found: f.append(w.grad.clone()))  # type: ignore[union-attr,misc]
            list(trained.train(batches(4, dtype=torch.float64)))
    assert torch.equal(torch.stack(seen[1.0]), torch.stack(seen[1024.0]))


def test_finite_batches_train_as_without_a_scaler() -> None:
    data = batches(6, dtype=torch.float64)
    assert_same(_trained(_scaler(), data)[0], _trained(None, data)[0])
    assert_same(_trained(_scaler(enabled=False), data)[0], _trained(None, data)[0])


def test_a_scale_too_large_for_float16_shrinks_until_it_fits() -> None:
    def run(**more: int) -> tuple[dict[str, Tensor], list[float]]:
        scaler = _scaler(2.0**24, growth_interval=3)
        with pipeline(grad_scaler=scaler, **more) as trained:
            iterator, scales = iter(data), []
            for _ in data:
                with torch.autocast("cpu", dtype=torch.float16):
                    trained.progress(iterator)
                scales.append(scaler.get_scale())
            return state_of(trained), scales

    data = batches(12)
    state, scales = run()
    assert_same(state, run(cache_rows=0)[0])
    plain = Plain()
    for name in FEATURES:
        plain.tables[name].float()
    assert scales == _in_a_plain_loop(PlainLoop(plain), _scaler(2.0**24, growth_interval=3), data, torch.float16)
    assert scales[0] == 2.0**23
    assert max(scales[-3:]) < scales[0]
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.redis
def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    whole, scales = _trained(_scaler(), _some_bad())
    folder: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "store": None}
    with pipeline(Small().double(), grad_scaler=_scaler(), **folder) as trained:
        iterator = iter(_some_bad())
        for _ in range(6):
            trained.progress(iterator)
        trained.save()
    scaler = _scaler(16.0)
    with pipeline(Small().double(), grad_scaler=scaler, **folder) as trained:
        resumed = [scaler.get_scale() for _ in trained.train(_some_bad())]
        assert_same(state_of(trained), whole)
    assert resumed == scales[6:]


def test_scalers_that_cannot_be_followed_are_refused() -> None:
    for scaler, message in (
        (_scaler(growth_factor=3.0), r"growth_factor 2 and backoff_factor 0.5, got \(3.0, 0.5\)"),
        (_scaler(backoff_factor=0.25), r"got \(2.0, 0.25\)"),
        (_scaler(1000.0), "a power of two, got 1000.0"),
        (_scaler(growth_interval=0), "growth_interval of at least 1, got 0"),
        (object(), "must be a torch.amp.GradScaler, got object"),
    ):
        with pytest.raises(InputError, match=message):
            pipeline(grad_scaler=scaler)


def test_a_scale_stays_in_float32s_range_as_torchs_does() -> None:
    holder = user_scaler(_scaler(LARGEST, growth_interval=1))
    assert holder is not None
    assert holder.read().after(is_finite=True).value == LARGEST
    holder.write(LossScale(value=1))
    assert holder.read().after(is_finite=False).value == 0.5
