"""Activations that leave for the host: their exact bytes on the device by row, and the bits of the job."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagpipe.errors import JobError
from tests.distributed.threads import run_threads
from tests.effort import some_of
from tests.pipeline.stage.steps import Case, merge, run_in_process, run_ranks_of
from tests.pipeline.stage.walked_stage import EXAMPLES, ONE, ROWS, WIDTH, Stage, layers


@pytest.mark.parametrize(
    ("row", "counted", "moved"), [("gpipe", 6, 2), ("1f1b", 4, 2), ("last", 1, 1), ("zero-bubble", 4, 2)]
)
def test_a_lane_holds_one_action_and_one_move(row: str, counted: int, moved: int) -> None:
    """Bytes on the device follow from the row alone, and gradients are the same bit for bit."""
    stays, leaves = (Stage(ROWS[row], layers(), moves=moves) for moves in (False, True))
    for stage in (stays, leaves):
        stage.run()
    assert (stays.kept.peak_bytes, leaves.kept.peak_bytes) == (counted * ONE, moved * ONE)
    assert all(torch.equal(*pair) for pair in zip(stays.gradients, leaves.gradients, strict=True))
    assert len(leaves.gradients) == len(stays.gradients) > 6
    copied = leaves.kept.lane.num_bytes
    assert copied["host"] == copied["device"] == (0 if row == "last" else copied["host"])
    assert stays.kept.lane.num_bytes == {"host": 0, "device": 0}


class Shared(nn.Module):
    """Saves a hidden tensor four times, as views too, and a constant, a parameter and its input besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) * 2)
        self.constant = torch.full((WIDTH,), 3.0, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        hidden = values * self.constant
        return (hidden * hidden) @ self.weight + hidden[:, ::2].repeat(1, 2) * hidden.t().t()


def test_memory_moves_once_and_parameters_and_inputs_stay() -> None:
    row = "0F0 0F1 0F2 0B0 0B1 0B2"
    stays, leaves = (Stage(row, Shared(), moves=moves) for moves in (False, True))
    for stage in (stays, leaves):
        stage.run()
    one = EXAMPLES * WIDTH * 8
    assert leaves.kept.lane.num_bytes == {"host": 9 * one, "device": 9 * one}, (
        "hidden, its square, and the repeated half"
    )
    assert all(torch.equal(*pair) for pair in zip(stays.gradients, leaves.gradients, strict=True))


class Counted(nn.Module):
    """Keeps a tensor of its own memory, and counts those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.made: list[weakref.ref[np.ndarray]] = []
        self.most = 0

    def forward(self, values: Tensor) -> Tensor:
        memory = np.full((EXAMPLES, WIDTH), 2.0)
        self.made.append(weakref.ref(memory))
        self.most = max(self.most, sum(each() is not None for each in self.made))
        return values * self.factor * torch.from_numpy(memory)


def test_memory_that_left_is_free() -> None:
    for moves, most in ((False, 6), (True, 2)):
        module = Counted()
        Stage(ROWS["gpipe"], module, moves=moves).run()
        assert module.most == most
        assert not any(each() is not None for each in module.made)


class Careless(nn.Module):
    """Changes what the backward of its first layer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.layer(values).exp()
        out = hidden * 2
        hidden.add_(1)
        return out * hidden


@pytest.mark.parametrize("moves", [False, True])
def test_what_autograd_refuses_is_refused(moves: bool) -> None:
    with pytest.raises(JobError, match=r"a tensor of shape \[8, 16\] that the backward needs was changed in place"):
        Stage("0F0 0F1 0B0 0B1", Careless(), moves=moves).run()


@pytest.mark.parametrize(
    "schedule", some_of(["1f1b", "gpipe", "interleaved", "breadth-first", "zb-h1", "zb-v", "dynamic"], {0, 2, 5})
)
def test_a_step_has_the_same_bits_and_fewer_bytes(schedule: str) -> None:
    """In lanes of one process and on ranks; recomputed micro-batches keep nothing to move."""
    stays = Case(model="dropout", schedule=schedule, micro=8, sizes=(32, 13), activations="counted")
    kept = run_in_process(stays)
    for recompute in (False, (0.5, 0.25, 0, 0)):
        case = dataclasses.replace(stays, activations="host", recompute=recompute)
        moved = run_in_process(case)
        moved.assert_same(kept)
        assert max(moved.peak_bytes.values()) < max(kept.peak_bytes.values())
    count = case.num_ranks
    ended = run_threads(count, run_ranks_of, [case], count, timeout_s=60)
    assert not any(end.error for end in ended), ended
    merge(case, [end.value[0] for end in ended], count).assert_same(kept)
