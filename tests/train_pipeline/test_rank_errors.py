"""Errors with several ranks: each rank ends at once, the failed one with its own error, the others with its name.

Deadlines between ranks are 120 s here, and a rank that hangs for 100 s is killed: nothing waits for a deadline.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.train_pipeline.rank_jobs import made, on_ranks, shard, values_of
from tests.train_pipeline.small import Small, progress_all, state_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


class _Own(Exception):
    """An error of the user's."""


class _Failing(Small):
    """Raises in a forward of rank 1: the fifth of training, or the second of an evaluation."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.calls = 0
        self.scored = 0

    def forward(self, batch: Any) -> Any:
        self.calls += self.training
        self.scored += not self.training
        if self.rank == 1 and (self.calls == 5 or self.scored == 2):
            raise _Own("in forward")
        return super().forward(batch)


def _model_fails(rank: int) -> None:
    with made(_Failing(rank).double()) as trained:
        progress_all(trained, iter(shard(rank)))


def _model_fails_without_a_with_block(rank: int) -> None:
    progress_all(made(_Failing(rank).double()), iter(shard(rank)))


def _evaluated_model_fails(rank: int) -> None:
    with made(_Failing(rank).double()) as trained:
        trained.progress(iter(shard(rank)))
        list(trained.evaluate(shard(rank, 6, seed=9)))


def _loop_fails(rank: int) -> None:
    with made() as trained:
        for number, _ in enumerate(trained.train(shard(rank))):
            if rank == 1 and number == 4:
                raise _Own("in forward")


def _loop_over_an_evaluation_fails(rank: int) -> None:
    with made() as trained:
        trained.progress(iter(shard(rank)))
        for number, _ in enumerate(trained.evaluate(shard(rank, 20, seed=9))):
            if rank == 1 and number == 4:
                raise _Own("in forward")


def _first_batch_fails(rank: int) -> None:
    with made() as trained:
        trained.rows("t_f0")
        if rank == 1:
            raise _Own("in forward")
        progress_all(trained, iter(shard(rank)))


@pytest.mark.parametrize(
    "work",
    [
        _model_fails,
        _model_fails_without_a_with_block,
        _evaluated_model_fails,
        _loop_fails,
        _first_batch_fails,
    ],
)
def test_the_failed_rank_raises_its_error_and_the_others_name_it(work: Any) -> None:
    first, second = on_ranks(2, work)
    assert second.error == ("_Own", "in forward")
    assert first.error == ("PeerError", "rank 1: _Own: in forward")
    assert (first.code, second.code) == (0, 0)


def test_a_rank_that_leaves_an_evaluation_by_an_error_is_named() -> None:
    first, second = on_ranks(2, _loop_over_an_evaluation_fails)
    assert second.error == ("_Own", "in forward")
    assert first.error is not None
    assert first.error[0] == "InputError"
    assert first.error[1].startswith("rank 1 has left the evaluation")


def _loader_fails(rank: int, uneven: str) -> Any:
    def failing() -> Iterator[Any]:
        yield from shard(rank, 5)
        if rank == 1:
            raise _Own("in the loader")
        yield from shard(rank, 7, seed=3)

    with made(uneven=uneven) as trained:
        iterator = failing()
        for _ in range(5):
            trained.progress(iterator)
        try:
            trained.progress(iterator)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        five = values_of(state_of(trained))
        scores = trained.evaluate(failing())
        try:
            list(scores)
        except Exception as error:
            text += f"; {type(error).__name__}: {error}"
        progress_all(trained, iter(shard(rank, 2, seed=4)))  # training can go on
        return text, five, trained.step


@pytest.mark.parametrize("uneven", ["stop", "join"])
def test_an_error_of_a_loader_comes_on_all_ranks_after_the_batches_before_it(uneven: str) -> None:
    first, second = on_ranks(2, _loader_fails, uneven)
    assert (first.error, second.error) == (None, None)
    other = "InputError: rank 1: _Own: in the loader"
    assert first.value[0] == f"{other}; {other}"
    assert second.value[0] == "_Own: in the loader; _Own: in the loader"
    assert [ended.value[2] for ended in (first, second)] == [7, 7]


def _bad_id(rank: int) -> None:
    many = shard(rank)
    if rank == 1:
        many[3]["ids"].values()[0] = 60
    with made() as trained:
        progress_all(trained, iter(many))


def test_an_id_outside_its_table_is_one_error_on_all_ranks() -> None:
    first, second = on_ranks(2, _bad_id)
    assert first.error is not None
    assert second.error is not None
    assert first.error[0] == second.error[0] == "InputError"
    assert "[0, 60), got 60" in first.error[1]
    assert "[0, 60), got 60" in second.error[1]


def _calls_differ(rank: int) -> None:
    with made() as trained:
        trained.progress(iter(shard(rank)))
        if rank == 0:
            trained.flush()
        else:
            trained.rows("t_f0")[[0]]


def _settings_differ(rank: int) -> None:
    with made(cache_rows=100 + rank) as trained:
        trained.flush()
        trained.progress(iter(shard(rank)))


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (_calls_differ, "the ranks' calls differ: call is 'flush' on rank 0 and 'rows' on rank 1"),
        (_settings_differ, "the ranks' models or options differ: cache_rows is 100 on rank 0 and 101 on rank 1"),
    ],
)
def test_ranks_that_differ_are_refused_with_both_values(work: Any, text: str) -> None:
    for ended in on_ranks(2, work):
        assert ended.error is not None
        # A rank that hears of the other's error before its own names that rank.
        assert (ended.error[0], ended.error[1].removeprefix("rank 0: ").removeprefix("rank 1: ")) == (
            "InputError",
            text,
        )


def _dies(rank: int) -> None:
    with made() as trained:
        for number, _ in enumerate(trained.train(shard(rank))):
            if rank == 1 and number == 4:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_ends_the_others() -> None:
    first, second = on_ranks(2, _dies)
    assert second.code == -9
    assert first.error is not None
    assert first.error[0] == "PeerError"
    assert "rank 1" in first.error[1]


def _other_default_group(rank: int) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    with made() as trained:
        trained.progress(iter(shard(rank)))


def test_a_default_group_of_other_ranks_is_refused() -> None:
    first, second = on_ranks(2, _other_default_group)
    assert second.error is not None
    assert second.error[1].startswith("expected a default process group of the job's ranks, got rank 0 of 1 where RANK")
    assert first.error is not None
    assert first.error[0] == "InputError"


def _calls_alone(rank: int) -> None:
    with made(peer_timeout_s=2.0) as trained:
        iterator = iter(shard(rank))
        trained.progress(iterator)
        if rank == 0:
            trained.flush()
        trained.progress(iterator)


def test_a_call_that_one_rank_makes_alone_ends_at_the_deadline() -> None:
    errors = [ended.error for ended in on_ranks(2, _calls_alone)]
    assert [error[0] for error in errors if error is not None] == ["PeerError", "PeerError"]


def _wrapped(rank: int) -> None:
    torch.distributed.init_process_group("gloo")
    try:
        model = Small()
        model.over = torch.nn.parallel.DistributedDataParallel(model.over)  # type: ignore[assignment]
        made(model.double())
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_whose_gradients_are_summed_already_is_refused() -> None:
    for ended in on_ranks(2, _wrapped):
        assert ended.error is not None
        assert ended.error[0] == "InputError"
        assert ended.error[1].startswith("expected a model without DistributedDataParallel")
