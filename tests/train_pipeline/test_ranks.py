"""Several ranks, each with its own loader: the results of one rank, uneven ends, evaluation beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe.errors import InputError
from tests.distributed.processes import Ended
from tests.effort import some_of
from tests.train_pipeline.rank_jobs import SIZES, joined, made, on_ranks, shard, values_of
from tests.train_pipeline.small import DIM, FEATURES, Small, pipeline, progress_all, state_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


def _values(ended: list[Ended]) -> list[Any]:
    assert [rank.error for rank in ended] == [None] * len(ended)
    assert all(rank.value is not None for rank in ended), ended
    return [rank.value for rank in ended]


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def _train(rank: int, settings: dict[str, Any], num: int = 12) -> Any:
    with made(**settings) as trained:
        losses = progress_all(trained, iter(shard(rank, num)))
        return values_of(state_of(trained)), [float(loss) for loss in losses]


def test_ranks_with_shards_train_like_one_rank_on_the_whole_batches() -> None:
    (first, losses), (second, other_losses) = _values(on_ranks(2, _train, {}))
    _assert_same(first, second)
    with pipeline(Small().double(), cache_rows=0) as trained:
        whole = [joined(parts) for parts in zip(shard(0), shard(1), strict=True)]
        expected_losses = [float(loss) for loss in progress_all(trained, iter(whole))]
        expected = values_of(state_of(trained))
    for name, value in expected.items():
        np.testing.assert_allclose(first[name], value, rtol=0, atol=1e-12)
    weighted = np.average([losses, other_losses], axis=0, weights=SIZES)
    np.testing.assert_allclose(weighted, expected_losses, rtol=0, atol=1e-12)


def test_results_depend_on_neither_cache_nor_planner() -> None:
    direct = _values(on_ranks(2, _train, {"cache_rows": 0}))
    for settings in ({"planner": "process"}, {"cache_rows": 60, "lookahead": 2, "prefetch_depth": 1}):
        for (state, losses), (expected, expected_losses) in zip(
            _values(on_ranks(2, _train, settings)), direct, strict=True
        ):
            _assert_same(state, expected)
            assert losses == expected_losses


def _uneven(rank: int, uneven: str) -> Any:
    with made(uneven=uneven) as trained:
        outputs = list(trained.train(shard(rank)[: 7 if rank else 4]))
        return [None if scores is None else len(scores) for scores in outputs], values_of(state_of(trained))


def test_all_ranks_stop_where_the_batches_of_one_end() -> None:
    (first, state), (second, other) = _values(on_ranks(2, _uneven, "stop"))
    assert first == [SIZES[0]] * 4
    assert second == [SIZES[1]] * 4
    _assert_same(state, other)
    _assert_same(state, _values(on_ranks(2, _train, {}, 4))[0][0])


def test_a_rank_without_batches_joins_until_those_of_all_have_ended() -> None:
    (first, state), (second, other) = _values(on_ranks(2, _uneven, "join"))
    assert first == [SIZES[0]] * 4 + [None] * 3
    assert second == [SIZES[1]] * 7
    _assert_same(state, other)
    with pipeline(Small().double()) as trained:
        both = [joined(parts) for parts in zip(shard(0)[:4], shard(1)[:4], strict=True)]
        progress_all(trained, iter([*both, *shard(1)[4:7]]))
        for name, value in values_of(state_of(trained)).items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-12)


def _evaluate_between(rank: int, planner: str, evaluates: bool) -> Any:
    scores: list[Any] = []
    with made(planner=planner) as trained:
        iterator = iter(shard(rank))
        for step in range(12):
            trained.progress(iterator)
            if evaluates and step % 3 == 1:
                # Not the same number of batches: all are scored.
                scores += [part.numpy() for part in trained.evaluate(shard(rank, 2 + 3 * rank, seed=9))]
            if evaluates and step == 6:
                for _ in zip(range(2), trained.evaluate(shard(rank, 9, seed=5)), strict=False):
                    pass  # left early, by all ranks
        assert not progress_all(trained, iterator)
        if evaluates:
            after = [part.numpy() for part in trained.evaluate(shard(rank, 2 + 3 * rank, seed=9))]
            return values_of(state_of(trained)), len(scores), after
        return values_of(state_of(trained)), 0, []


@pytest.mark.parametrize("planner", some_of(["inline", "process"], {1}))
def test_evaluations_change_no_bit_of_the_training(planner: str) -> None:
    evaluated = _values(on_ranks(2, _evaluate_between, planner, True))
    undisturbed = _values(on_ranks(2, _evaluate_between, planner, False))
    assert [number for _, number, _ in evaluated] == [4 * 2, 4 * 5]
    for (state, _, _), (expected, _, _) in zip(evaluated, undisturbed, strict=True):
        _assert_same(state, expected)
    with pipeline(Small().double()) as trained:
        progress_all(trained, iter([joined(parts) for parts in zip(shard(0), shard(1), strict=True)]))
        for rank, (_, _, scores) in enumerate(evaluated):
            expected_scores = list(trained.evaluate(shard(rank, 2 + 3 * rank, seed=9)))
            for ours, expected_part in zip(scores, expected_scores, strict=True):
                np.testing.assert_allclose(ours, expected_part.numpy(), rtol=0, atol=1e-12)


def _leave_an_evaluation(rank: int) -> Any:
    with made() as trained:
        trained.progress(iterator := iter(shard(rank)))
        try:
            for number, _ in enumerate(trained.evaluate(shard(rank, 60, seed=9))):
                if rank == 1 and number == 2:
                    break
            text = ""
        except InputError as error:
            text = str(error)
        progress_all(trained, iterator)
        return text, values_of(state_of(trained))


def test_an_evaluation_that_one_rank_leaves_ends_for_all() -> None:
    (text, state), (own, _) = _values(on_ranks(2, _leave_an_evaluation))
    assert text.startswith("rank 1 has left the evaluation")
    assert own == ""
    _assert_same(state, _values(on_ranks(2, _train, {}))[0][0])


class _Normed(nn.Module):
    """The small model with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.small = Small()
        self.over = self.small.over
        self.norm = nn.BatchNorm1d(DIM * len(FEATURES))

    def forward(self, batch: Any) -> Any:
        scores = self.over(self.norm(self.small.bags(batch["ids"]).values())).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


def _buffers(rank: int) -> Any:
    with made(_Normed().double()) as trained:
        iterator = iter(shard(rank))
        for _ in range(3):
            trained.progress(iterator)
        own = trained.model.norm.running_mean.tolist()
        saved = trained.dense_state_dict()["norm.running_mean"].tolist()
        (scores, *_) = trained.evaluate(shard(0, 1, seed=9))
        assert trained.model.norm.running_mean.tolist() == own
        progress_all(trained, iterator)
        ended = trained.model.norm.running_mean.tolist()
        trained.progress(iter(shard(rank, 3, seed=4)))
    return own, saved, ended, scores.tolist(), trained.model.norm.running_mean.tolist()


def test_buffers_of_a_result_are_those_of_rank_0() -> None:
    (own, saved, ended, scores, closed), (other, *others) = _values(on_ranks(2, _buffers))
    assert own != other
    assert saved == own
    assert others == [saved, ended, scores, closed]


def _train_twice(rank: int, is_initialised: bool) -> Any:
    if is_initialised:
        torch.distributed.init_process_group("gloo")
    results = []
    for _ in range(2):
        with made() as trained:
            trained.progress(iter(shard(rank)))
            results.append(values_of(state_of(trained)))
    assert torch.distributed.is_initialized() == is_initialised
    if is_initialised:
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert float(total) == 2
        torch.distributed.destroy_process_group()
    return results


@pytest.mark.parametrize("is_initialised", some_of([False, True], {1}))
def test_pipelines_follow_one_another_beside_a_default_group_of_the_program(is_initialised: bool) -> None:
    (first, again), _ = _values(on_ranks(2, _train_twice, is_initialised))
    _assert_same(first, again)


def _close_between(rank: int) -> Any:
    with made() as trained:
        iterator = iter(shard(rank, 40))
        for _ in range(5):
            trained.progress(iterator)
        trained.reset()
        other = iter(shard(rank, 40, seed=3))
        for _ in range(2):
            trained.progress(other)
        assert len(trained.rows("t_f0")[[0, 1]]) == 2
        return values_of(state_of(trained))


def test_training_can_be_left_between_two_batches() -> None:
    first, second = _values(on_ranks(2, _close_between))
    _assert_same(first, second)
    with pipeline(Small().double()) as trained:
        many = [joined(parts) for parts in zip(shard(0, 5), shard(1, 5), strict=True)]
        more = [joined(parts) for parts in zip(shard(0, 2, seed=3), shard(1, 2, seed=3), strict=True)]
        progress_all(trained, iter([*many, *more]))
        for name, value in values_of(state_of(trained)).items():
            np.testing.assert_allclose(first[name], value, rtol=0, atol=1e-12)


def _resume(rank: int, folder: str, stops: int) -> Any:
    settings: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 2, "planner": "process"}
    with made(**settings) as trained:
        for _ in trained.train(shard(rank)):
            if trained.step == stops:
                break
    with made(**settings) as trained:
        began = trained.step
        for _ in trained.train(shard(rank)):
            if trained.step == stops + 3:
                trained.save()
        return began, values_of(state_of(trained))


@pytest.mark.parametrize("stops", some_of([4, 5], {1}))
def test_ranks_resume_from_a_checkpoint_that_they_made_together(stops: int, tmp_path: Path) -> None:
    resumed = _values(on_ranks(2, _resume, str(tmp_path / "checkpoints"), stops))
    assert [began for began, _ in resumed] == [stops, stops]
    for (_, state), (expected, _) in zip(resumed, _values(on_ranks(2, _train, {})), strict=True):
        _assert_same(state, expected)


class _Count:
    """What one rank alone counts between two epochs."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _counted(rank: int, folder: str) -> Any:
    seen = []
    for num in (2, 3):
        with made(checkpoint_dir=folder) as trained:
            count = _Count()
            trained.track("count", count)
            seen.append(count.value)
            for epoch in range(trained.epoch, num):
                list(trained.train(shard(rank, 3, seed=epoch)))
                count.value += rank
            state = values_of(state_of(trained))
    return seen, state


def test_what_one_rank_changes_between_two_epochs_is_in_the_checkpoint_of_all(tmp_path: Path) -> None:
    (first, state), (second, other) = _values(on_ranks(2, _counted, str(tmp_path / "checkpoints")))
    assert (first, second) == ([0, 0], [0, 2])
    _assert_same(state, other)


def _without_batches(rank: int) -> Any:
    with made(uneven="join") as trained:
        number = len(list(trained.train(shard(rank, 3 * rank))))
        return number, len(list(trained.train([]))), values_of(state_of(trained))


def test_a_rank_can_have_no_batch_at_all() -> None:
    (first, none, state), (second, _, other) = _values(on_ranks(2, _without_batches))
    assert (first, second, none) == (3, 3, 0)
    _assert_same(state, other)


def _accumulate(rank: int) -> Any:
    with made(accumulate=2, uneven="join") as trained:
        iterator = iter(shard(rank, 8 - 3 * rank))
        for _ in range(4):
            trained.progress(iterator)
        assert len(list(trained.evaluate(shard(rank, 3 - rank, seed=9)))) == 3 - rank
        progress_all(trained, iterator)
        return trained.step, values_of(state_of(trained))


def test_ranks_accumulate_gradients_and_evaluate_between_steps() -> None:
    (first, state), (second, other) = _values(on_ranks(2, _accumulate))
    assert first == second == 4
    _assert_same(state, other)
    steps = [joined([*shard(0)[n : n + 2], *shard(1)[n : min(n + 2, 5)]]) for n in range(0, 8, 2)]
    with pipeline(Small().double()) as trained:
        progress_all(trained, iter(steps))
        for name, value in values_of(state_of(trained)).items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-12)


def _count(rank: int, numbers: tuple[int, ...], accumulate: int) -> Any:
    """Calls of `progress`: the outputs of each, of two iterators; every call is made by all ranks."""
    with made(accumulate=accumulate, uneven="join") as trained:
        found = []
        for seed in (0, 3):
            iterator = iter(shard(rank, numbers[rank], seed))
            for call in range(max(numbers)):
                scores = trained.progress(iterator)
                found.append((None if scores is None else len(scores), trained.step))
                if (call + 1) % accumulate == 0:
                    trained.flush()  # a call of all ranks between two steps
            assert not progress_all(trained, iterator)
        return found, values_of(state_of(trained))


#: Batches of each rank, and of a step: one ends inside a step, at its start, with none, or both do.
ENDS = [((8, 5), 2), ((4, 8), 2), ((5, 0), 2), ((0, 4), 3), ((7, 4), 3), ((3, 8), 3), ((1, 2), 4)]


@pytest.mark.parametrize(("numbers", "accumulate"), some_of(ENDS, {0, 2, 5}))
def test_ranks_that_join_count_batches_as_the_others(numbers: tuple[int, int], accumulate: int) -> None:
    (first, state), (second, other) = _values(on_ranks(2, _count, numbers, accumulate))
    for size, number, found in zip(SIZES, numbers, (first, second), strict=True):
        for scores in (found[: max(numbers)], found[max(numbers) :]):
            outputs = [scores for scores, _ in scores]
            assert sorted(outputs, key=lambda size: size is None) == [size] * number + [None] * (max(numbers) - number)
    assert [step for _, step in first] == [step for _, step in second]
    _assert_same(state, other)
    with pipeline(Small().double()) as trained:
        for seed in (0, 3):
            parts = [shard(rank, numbers[rank], seed) for rank in range(2)]
            ends = range(0, max(numbers), accumulate)
            progress_all(trained, iter([joined([b for own in parts for b in own[n : n + accumulate]]) for n in ends]))
        assert trained.step == first[-1][1]
        for name, value in values_of(state_of(trained)).items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-12)
