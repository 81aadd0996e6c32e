"""Batches without examples: what plain torch makes of them; a mean over none is left out or named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from bagpipe.errors import JobError
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.rank_jobs import made, on_ranks, shard, values_of
from tests.train_pipeline.small import FEATURES, Plain, Small, assert_same, batches, pipeline, progress_all, state_of


def empty() -> Any:
    """A batch without examples."""
    nothing = torch.empty(0, dtype=torch.int64)
    ids = KeyedJaggedTensor(keys=list(FEATURES), values=nothing, lengths=nothing, stride=0)
    return {"ids": ids, "labels": torch.empty(0, dtype=torch.float64)}


def _with_empty(num: int, *where: int) -> list[Any]:
    data = batches(num, dtype=torch.float64)
    for index in where:
        data.insert(index, empty())
    return data


class _Summed:
    """Mixed in: the loss is a sum over the examples, or the vector of their losses."""

    as_vector = False

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        _, scores = super().forward(batch)  # type: ignore[misc]
        vectors = self.vectors(batch["ids"])  # type: ignore[attr-defined]
        losses = (self.over(vectors).squeeze(-1) - batch["labels"]).square()  # type: ignore[attr-defined]
        return losses if self.as_vector else losses.sum(), scores


class SummedSmall(_Summed, Small):
    def vectors(self, ids: KeyedJaggedTensor) -> Tensor:
        found: Tensor = self.bags(ids).values()
        return found


class SummedPlain(_Summed, Plain):
    def vectors(self, ids: KeyedJaggedTensor) -> Tensor:
        by_key = ids.to_dict()
        parts = [self.tables[name](by_key[name].values(), by_key[name].offsets().long()) for name in FEATURES]
        return torch.cat(parts, 1)


@pytest.mark.parametrize("as_vector", [False, True])
@pytest.mark.parametrize("where", [(0,), (2,), (3, 4), (6,)])
def test_a_loss_that_is_a_sum_trains_as_in_a_plain_loop(where: tuple[int, ...], as_vector: bool) -> None:
    """The dense optimizer steps at an empty batch too: Adam's momentum goes on."""
    data, states = _with_empty(6, *where), []
    for rows in (0, 120):
        model = SummedSmall().double()
        model.as_vector = as_vector
        with pipeline(model, cache_rows=rows) as trained:
            outputs = list(trained.train(data))
            assert [len(scores) for scores in outputs] == [len(batch["labels"]) for batch in data]
            assert trained.step == len(data)
            states.append(state_of(trained))
    assert_same(*states)
    loop = PlainLoop(SummedPlain().double())
    for batch in data:
        loop.zero_grad()
        loop.model(batch)[0].sum().backward()
        loop.step()
    assert_close(states[0], loop.state())


def test_a_mean_over_no_examples_is_left_out_or_named() -> None:
    data = _with_empty(4, 0, 3)
    with pipeline(Small().double(), nonfinite="skip") as trained:
        outputs = list(trained.train(data))
        assert [len(scores) for scores in outputs] == [len(batch["labels"]) for batch in data]
        state = state_of(trained)
    with pipeline(Small().double()) as trained:
        progress_all(trained, iter(batches(4, dtype=torch.float64)))
        assert_same(state, state_of(trained))
    text = r"batch 3: the loss of a batch without examples is not finite.*nonfinite=\"skip\" leaves such batches out"
    with pipeline(Small().double()) as trained, pytest.raises(JobError, match=text):
        progress_all(trained, iter(_with_empty(4, 3)))


def test_an_evaluation_scores_every_batch() -> None:
    data = _with_empty(3, 0, 2, 5)
    model = Small().double()
    with pipeline(model) as trained:
        before = state_of(trained)
        assert [len(scores) for scores in trained.evaluate(data)] == [len(batch["labels"]) for batch in data]
        assert_same(before, state_of(trained))


def test_steps_of_several_batches_may_have_empty_ones() -> None:
    """One beside others counts for nothing, and the model does not see it; a step of empty ones has a loss."""
    with pipeline(Small().double(), accumulate=2) as trained:
        outputs = list(trained.train(_with_empty(4, 1, 4)))
        assert [scores is None for scores in outputs] == [False, True, False, False, True, False]
        state = state_of(trained)
    loop, data = PlainLoop(), batches(4, dtype=torch.float64)
    for parts in (data[:1], data[1:3], data[3:]):
        loop.zero_grad()
        for batch in parts:
            (loop.model(batch)[0] / len(parts)).backward()
        loop.step()
    assert_close(state, loop.state())
    with pipeline(Small().double(), accumulate=2, nonfinite="skip") as trained:
        outputs = list(trained.train(_with_empty(4, 2, 2)))
        assert [len(scores) for scores in outputs] == [8, 8, 0, 0, 8, 8]
        skipped = state_of(trained)
    with pipeline(Small().double(), accumulate=2) as trained:
        progress_all(trained, iter(batches(4, dtype=torch.float64)))
        assert_same(skipped, state_of(trained))


def _on_rank(rank: int) -> Any:
    data = shard(rank, 5)
    if rank:
        data[1], data[4] = empty(), empty()
    with made() as trained:
        outputs = [None if scores is None else len(scores) for scores in trained.train(data)]
        scored = [len(scores) for scores in trained.evaluate([empty(), *shard(rank, 2, seed=3)])]
        return outputs, scored, values_of(state_of(trained))


@pytest.mark.multiproc
@pytest.mark.redis
def test_a_rank_without_examples_counts_for_nothing() -> None:
    (first, scored, state), (second, others_scored, other) = (run.value for run in on_ranks(2, _on_rank))
    assert (first, second) == ([8] * 5, [5, None, 5, 5, None])
    assert (scored, others_scored) == ([0, 8, 8], [0, 5, 5])
    loop = PlainLoop()
    for b, parts in enumerate(zip(shard(0, 5), shard(1, 5), strict=True)):
        counted = parts[:1] if b in (1, 4) else parts
        total = sum(len(batch["labels"]) for batch in counted)
        loop.zero_grad()
        for batch in counted:
            (loop.model(batch)[0] * len(batch["labels"]) / total).backward()
        loop.step()
    for name, value in loop.state().items():
        np.testing.assert_allclose(state[name], value.numpy(), rtol=0, atol=1e-12)
        assert np.array_equal(state[name], other[name])
