"""Copies of a pipeline's model, what it shows of its tables, and calls of it outside of a step."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bagpipe
from bagpipe.errors import InputError, JobError
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _pickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))  # noqa: S301
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_has_dense_parameters_of_its_own_and_no_rows_outside_of_a_step(copied: Any) -> None:
    with pipeline() as trained:
        iterator = iter(batches(4))
        trained.progress(iterator)
        other = copied(trained.model)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        assert_same(before, trained.dense_state_dict())
        assert str(other) == str(trained.model)
        for _ in range(3):
            trained.progress(iterator)
        assert_same(before, dict(other.state_dict()))
        assert not torch.equal(before["over.weight"], trained.model.over.weight)
        with pytest.raises(JobError, match=r"rows only while a pipeline computes a batch.*evaluate\(loader\) scores"):
            other(batches(1)[0])
        other.over.weight.data.zero_()
        state = state_of(trained)
    with pipeline() as trained:
        progress_all(trained, iter(batches(4)))
        assert_same(state, state_of(trained))


def test_an_average_of_the_pipeline_s_model_is_that_of_its_dense_part() -> None:
    with pipeline() as trained:
        loop = trained.train(batches(6))
        next(loop)
        mean = AveragedModel(trained.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        expected = None
        for _ in loop:
            mean.update_parameters(trained.model)
            weight = trained.model.over.weight.detach().clone()
            expected = weight if expected is None else expected.lerp(weight, 1 - 0.9)
        assert expected is not None
        assert torch.equal(mean.module.over.weight, expected)


def test_averages_are_scored_between_two_batches_and_change_no_bit() -> None:
    states = []
    for is_scored in (False, True):
        with pipeline() as trained:
            loop = trained.train(batches(6))
            next(loop)
            mean = AveragedModel(trained.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            for number, _ in enumerate(loop):
                mean.update_parameters(trained.model)
                if is_scored and number == 2:
                    own = trained.dense_state_dict()
                    trained.model.load_state_dict(mean.module.state_dict())
                    scores = torch.cat(list(trained.evaluate(batches(2, seed=7))))
                    trained.model.load_state_dict(own)
                    others = torch.cat(list(trained.evaluate(batches(2, seed=7))))
                    assert not torch.equal(scores, others)
            states.append(state_of(trained))
    assert_same(*states)


class Taught(Small):
    """Its loss is the distance to the scores of a copy, in the same forward."""

    teacher: list[nn.Module]

    def forward(self, batch: Any) -> Any:
        loss, scores = super().forward(batch)
        if not self.teacher:
            return loss, scores
        with torch.no_grad():
            _, others = self.teacher[0](batch)
        return loss, (scores, others)


def test_a_copy_that_is_called_inside_the_step_reads_the_rows_of_the_batch() -> None:
    Taught.teacher = []
    model = Taught()
    with pipeline(model) as trained:
        other = copy.deepcopy(trained.model)
        model.teacher = [Small.forward.__get__(other)]  # its dense weights do not change
        (first, taught), *more = list(trained.train(batches(3)))
    assert torch.equal(first, taught)
    assert not any(torch.equal(own, others) for own, others in more)


class Hooked(Small):
    """Has its collection in a list, too, where torch does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [self.bags]

    def forward(self, batch: Any) -> Any:
        scores = self.over(self.plain[0](batch["ids"]).values()).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


def test_whoever_holds_a_collection_or_a_hook_on_it_goes_on_with_it() -> None:
    model, calls = Hooked(), []
    held = model.bags
    held.mine = "mine"
    handle = held.register_forward_hook(lambda *_: calls.append("after"))
    held.register_forward_pre_hook(lambda *_: calls.append("before"))
    held.eval()
    with pipeline(model) as trained:
        assert trained.model.bags is held
        assert (held.mine, held.training) == ("mine", False)
        iterator = iter(batches(3))
        trained.progress(iterator)
        assert calls == ["before", "after"]
        handle.remove()
        trained.progress(iterator)
        assert calls == ["before", "after", "before"]


class Penalised(Small):
    def forward(self, batch: Any) -> Any:
        loss, scores = super().forward(batch)
        return loss + self.bags.embedding_bags["t_f1"].weight.square().sum(), scores


def test_a_weight_in_the_forward_is_refused_in_words_about_rows() -> None:
    with pipeline(Penalised()) as trained, pytest.raises(InputError, match=r"pipeline\.rows\('t_f1'\)\[ids\] reads"):
        trained.progress(iter(batches(1)))


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_call_outside_of_a_step_says_where_it_works_and_changes_nothing(when: str) -> None:
    losses: list[list[float]] = []
    for calls in (False, True):
        with pipeline() as trained:
            losses.append([])
            iterator = iter(batches(3))
            for step in range(3):
                if calls and (when, step) in {("before", 0), ("between", 2)}:
                    with pytest.raises(JobError, match="a table has rows only while a pipeline computes a batch"):
                        trained.model(batches(1)[0])
                trained.progress(iterator)
                assert trained.loss is not None
                losses[-1].append(trained.loss.item())
        if calls and when == "after":
            with pytest.raises(JobError, match="a table has rows only while a pipeline computes a batch"):
                trained.model(batches(1)[0])
    assert losses[0] == losses[1]


def test_a_model_with_kfac_is_copied_too() -> None:
    model = Small()
    optimizer = bagpipe.KfacOptimizer(model, torch.optim.SGD(model.over.parameters(), lr=0.01))
    with pipeline(model, optimizer=optimizer) as trained:
        progress_all(trained, iter(batches(2)))
        assert_same(dict(copy.deepcopy(trained.model).state_dict()), trained.dense_state_dict())
