from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bagpipe.dense.chunks.arena import Arena, Part
from bagpipe.dense.chunks.moments import Moment, Trace, Use
from bagpipe.dense.chunks.walker import Walker
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import NullStreams
from tests.dense.chunks.poison import PoisonedArena
from tests.dense.chunks.traces import random_trace


@pytest.fixture
def closing() -> Iterator[list[Arena]]:
    arenas: list[Arena] = []
    yield arenas
    for arena in arenas:
        arena.lane.close()


class Memory:
    """Chunks with a number each, and what they should hold."""

    def __init__(self, num_chunks: int, num_slots: int, closing: list[Arena]) -> None:
        self.arena = PoisonedArena(256, num_slots, device=torch.device("cpu"), streams=NullStreams())
        self.arena.lane.open()
        closing.append(self.arena)
        self.walker = Walker(self.arena, "dense.budget_bytes 512")
        self.tensors = [torch.zeros((), dtype=torch.float64) for _ in range(num_chunks)]
        for chunk, tensor in enumerate(self.tensors):
            self.arena.place(tensor, Part.of(tensor, chunk, 0))
        self.wanted = [0.0] * num_chunks
        self.clock = 0.0

    def run(self, trace: Trace) -> None:
        self.walker.begin()
        for moment in trace:
            self.enter(moment)
        self.walker.end()

    def enter(self, moment: Moment) -> None:
        self.walker.enter(moment)
        for use in moment.uses:
            assert self.arena.find(self.tensors[use.chunk]) == (use.chunk, 0)
            if use.reads:
                assert self.tensors[use.chunk].item() == self.wanted[use.chunk]
            if use.writes:
                self.clock += 1.0
                self.tensors[use.chunk].fill_(self.clock)
                self.wanted[use.chunk] = self.clock


def test_walks_recorded_orders_and_keeps_every_value(closing: list[Arena]) -> None:
    for seed in range(40):
        trace, num_slots = random_trace(seed)
        memory = Memory(6, num_slots, closing)
        for _ in range(5):
            memory.run(trace)
        plan = memory.walker.plan
        assert plan is not None
        assert plan.trace == tuple(trace)
        memory.walker.rest()
        assert [tensor.item() for tensor in memory.tensors] == memory.wanted


def test_another_order_goes_on_demand_and_is_followed_if_it_comes_again(closing: list[Arena]) -> None:
    first, _ = random_trace(3)
    other = [Moment("other", (Use(0, writes=True), Use(5))), *reversed(first)]
    memory = Memory(6, 3, closing)
    short = first[:1]
    runs = [(first, first), (first, first), (other, first), (short, first), (other, first), (other, other),
            (first, first), (other, other)]  # fmt: skip
    for trace, followed in runs:
        memory.run(trace)
        memory.enter(Moment("scored between two batches", (Use(4), Use(2))))
        assert memory.walker.plan is not None
        assert memory.walker.plan.trace == tuple(followed)


def test_a_moment_that_does_not_fit_is_refused(closing: list[Arena]) -> None:
    memory = Memory(6, 2, closing)
    memory.walker.begin()
    with pytest.raises(
        InputError, match=r"budget_bytes 512 is below what all uses at once: 768 bytes, 3 chunks of 256"
    ):
        memory.walker.enter(Moment("all", (Use(0), Use(1), Use(2))))
