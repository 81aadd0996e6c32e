"""One step for several batches equals that of a plain loop which weighs each by its share of the examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torchrec import KeyedJaggedTensor

from bagpipe.errors import InputError, JobError
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.small import FEATURES, Small, assert_same, batches, pipeline, progress_all, state_of

#: Batches of an iterator: the last group is smaller.
NUM = 11


def _data(num: int = NUM, seed: int = 0) -> list[Any]:
    """Batches of 8 and of 5 examples."""
    made = batches(num, seed=seed, dtype=torch.float64)
    for batch in made[1::3]:
        lengths = batch["ids"].lengths().view(len(FEATURES), -1)
        parts = torch.split(batch["ids"].values(), batch["ids"].length_per_key())
        kept = lengths[:, :5].contiguous()
        values = torch.cat([part[: int(own.sum())] for part, own in zip(parts, kept, strict=True)])
        batch["ids"] = KeyedJaggedTensor.from_lengths_sync(list(FEATURES), values, kept.reshape(-1))
        batch["labels"] = batch["labels"][:5]
    return made


def _trained(accumulate: int, **more: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    with pipeline(Small().double(), accumulate=accumulate, **{"cache_rows": 175, **more}) as trained:
        losses = progress_all(trained, iter(_data()))
        assert trained.step == -(-NUM // accumulate)
        return state_of(trained), losses


def _groups(accumulate: int) -> Iterator[list[Any]]:
    data = _data()
    for first in range(0, NUM, accumulate):
        yield data[first : first + accumulate]


@pytest.mark.parametrize("accumulate", [2, 3, 4, 11, 20])
def test_steps_are_those_of_a_plain_loop(accumulate: int) -> None:
    state, losses = _trained(accumulate)
    direct, direct_losses = _trained(accumulate, cache_rows=0)
    assert_same(state, direct)
    assert torch.equal(torch.stack(losses), torch.stack(direct_losses))
    loop, expected = PlainLoop(), []
    for group in _groups(accumulate):
        loop.zero_grad()
        num_examples = sum(len(batch["labels"]) for batch in group)
        for batch in group:
            loss, _ = loop.model(batch)
            (loss * len(batch["labels"]) / num_examples).backward()
            expected.append(loss.detach())
        loop.step()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=1e-12)
    assert_close(state, loop.state())


@pytest.mark.parametrize("more", [{"cache_rows": 120}, {"lookahead": 1}, {"planner": "process"}, {"prefetch_depth": 1}])
def test_results_depend_on_no_setting_of_the_cache(more: dict[str, Any]) -> None:
    state, losses = _trained(3, **more)
    direct, direct_losses = _trained(3, cache_rows=0)
    assert_same(state, direct)
    assert torch.equal(torch.stack(losses), torch.stack(direct_losses))


def test_outputs_and_losses_are_those_of_each_batch() -> None:
    with pipeline(Small().double(), accumulate=4) as trained:
        steps, sizes = [], []
        for outputs in trained.train(_data()):
            steps.append(trained.step)
            sizes.append(len(outputs))
        assert trained.optimizer.state[trained.model.over.weight]["step"] == 3  # type: ignore[union-attr,index]
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
    assert sizes == [8, 5, 8] * 3 + [8, 5]


def test_clipping_and_scale_see_the_whole_step() -> None:
    scaler, seen = GradScaler("cpu", init_scale=256.0, growth_interval=2), []

    def run(scaler: GradScaler, **more: int) -> dict[str, Tensor]:
        with pipeline(Small().double(), accumulate=4, grad_scaler=scaler, **{"cache_rows": 175, **more}) as trained:

            def clip(*_: Any) -> None:
                seen.append(float(torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 0.1)))

            trained.optimizer.register_step_pre_hook(clip)
            list(trained.train(data))
            return state_of(trained)

    data = _data()
    data[5]["labels"][0] = float("inf")  # the second of three steps is left out
    state = run(scaler)
    assert_same(state, run(GradScaler("cpu", init_scale=256.0, growth_interval=2), cache_rows=0))
    loop, norms = PlainLoop(), []
    for number in (0, 8):
        group = data[number : number + 4]
        loop.zero_grad()
        for batch in group:
            loss, _ = loop.model(batch)
            (loss * len(batch["labels"]) / sum(len(other["labels"]) for other in group)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.over.parameters(), 0.1)))
        loop.step()
    assert seen[:2] == pytest.approx(norms, rel=0, abs=1e-12)
    assert scaler.get_scale() == 128
    assert_close(state, loop.state())


class Normed(Small):
    """With a buffer that forwards change, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, scores = super().forward(batch)
        self.norm(scores[:, None])
        return loss * torch.rand((), dtype=loss.dtype), scores


def test_evaluating_and_reading_rows_in_a_group_change_no_bit() -> None:
    def run(*, interrupted: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        with pipeline(Normed().double(), accumulate=4) as trained:
            for _ in trained.train(_data()):
                if interrupted:
                    assert len(list(trained.evaluate(_data(2, seed=9)))) == 2
                    trained.rows("t_f0")[[0, 1]]
            return {**state_of(trained), **dict(trained.model.named_buffers())}

    assert_same(run(interrupted=True), run(interrupted=False))


def test_batches_of_a_group_that_is_given_up_change_nothing() -> None:
    def run(*, dropped: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        with pipeline(Normed().double(), accumulate=4) as trained:
            iterator = iter(_data(seed=5))
            for _ in range(4 + dropped):
                trained.progress(iterator)
            trained.reset()
            progress_all(trained, iter(_data()))
            return {**state_of(trained), **dict(trained.model.named_buffers())}

    assert_same(run(dropped=3), run(dropped=0))


def test_an_error_of_the_iterator_comes_after_a_step_of_the_batches_before() -> None:
    class Own(Exception):
        pass

    def failing() -> Iterator[Any]:
        yield from _data()[:6]
        raise Own

    with pipeline(Small().double(), accumulate=4) as trained:
        iterator = failing()
        for _ in range(6):
            trained.progress(iterator)
        assert trained.step == 2
        with pytest.raises(Own):
            trained.progress(iterator)
        state = state_of(trained)
    with pipeline(Small().double(), accumulate=4) as trained:
        progress_all(trained, iter(_data()[:6]))
        assert_same(state, state_of(trained))


def test_a_loss_that_is_not_finite_is_named_at_the_end_of_its_step() -> None:
    data = _data()
    data[5]["labels"][0] = float("nan")
    with pipeline(Small().double(), accumulate=4) as trained, pytest.raises(JobError, match="batch 1: the loss is not"):
        progress_all(trained, iter(data))


@pytest.mark.redis
@pytest.mark.parametrize("stop_at", [4, 6])
def test_a_job_resumes_at_a_step(tmp_path: Path, stop_at: int) -> None:
    def new(**more: Any) -> Any:
        return pipeline(Normed().double(), accumulate=4, **more)

    torch.manual_seed(3)
    with new() as trained:
        list(trained.train(_data()))
        whole = {**state_of(trained), **dict(trained.model.named_buffers())}
    torch.manual_seed(3)
    folder: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "store": None}
    with new(**folder) as trained:
        iterator = iter(_data())
        for number in range(stop_at):
            if number in (1, 2):
                with pytest.raises(InputError, match=f"of the 4 batches of step 0, {number} are done"):
                    trained.save()
                with pytest.raises(InputError, match=f"of the 4 batches of step 0, {number} are done"):
                    trained.state_dict()
            trained.progress(iterator)
    with new(**folder) as trained:
        assert len(list(trained.train(_data()))) == NUM - 4
        assert_same({**state_of(trained), **dict(trained.model.named_buffers())}, whole)


def test_a_number_of_batches_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="accumulate must be an integer of at least 1, got 0"):
        pipeline(accumulate=0)
