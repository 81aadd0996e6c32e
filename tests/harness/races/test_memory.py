"""Freed memory: reuse while another stream still uses it is a race."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.harness.races.clocks import Agent
from tests.harness.races.memory import Conflict, Home, Memory
from tests.harness.races.operators import Access

OURS, THEIRS = 1, 2


class _Streams:
    """Two streams that use one memory."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.agents = {number: Agent(number, str(number)) for number in (OURS, THEIRS)}

    def use(self, number: int, tensor: Tensor, *, writes: bool = True, is_result: bool = False) -> list[Conflict]:
        agent = self.agents[number]
        time = agent.clock.advance(number)
        self.memory.sweep()
        access = Access(tensor=tensor, writes=writes, is_result=is_result)
        return list(self.memory.use(access, agent, time, 3, on_device=True))

    def allocate(self) -> tuple[Tensor, list[Conflict]]:
        tensor = torch.ones(4)
        return tensor, self.use(OURS, tensor, is_result=True)

    def wait(self) -> None:
        """Make our stream wait for theirs."""
        self.agents[OURS].clock.join(self.agents[THEIRS].clock)


def used_by_both() -> tuple[_Streams, Tensor]:
    streams = _Streams()
    tensor, _ = streams.allocate()
    streams.agents[THEIRS].clock.join(streams.agents[OURS].clock)
    assert streams.use(THEIRS, tensor, writes=False) == []
    return streams, tensor


def test_reuse_of_memory_in_use_is_a_race() -> None:
    streams, tensor = used_by_both()
    del tensor
    assert streams.allocate()[1] == [Conflict(THEIRS, 1, False, is_reuse=True)]
    assert streams.allocate()[1] == [], "reported once"


def test_reuse_after_a_wait_is_no_race() -> None:
    streams, tensor = used_by_both()
    del tensor
    streams.wait()  # after it was freed and before it is reallocated
    assert streams.allocate()[1] == []


def test_reuse_of_kept_memory_is_no_race() -> None:
    streams, tensor = used_by_both()
    streams.memory.keep(tensor, streams.agents[THEIRS])
    del tensor
    assert streams.allocate()[1] == []


def test_a_view_holds_all_of_the_memory() -> None:
    streams, tensor = used_by_both()
    view = tensor[1:2]
    del tensor
    assert streams.allocate()[1] == []
    assert [(found.agent, found.is_reuse) for found in streams.use(OURS, view)] == [(THEIRS, False)]


def test_freed_storages_are_forgotten() -> None:
    streams = _Streams()
    for _ in range(3):
        tensor, found = streams.allocate()
        assert found == []
        assert len(streams.memory) == 1
        del tensor
    assert len(streams.memory) == 0


def test_kinds_of_memory() -> None:
    streams = _Streams()
    memory = streams.memory
    made, _ = streams.allocate()
    given, lone, pinned = torch.ones(2), torch.ones(()), torch.ones(2)
    memory.pin(pinned)
    for tensor in (given, lone, pinned):
        memory.adopt(tensor)
    homes = [memory.home(tensor) for tensor in (made, given, lone, pinned)]
    assert homes == [Home.DEVICE, Home.DEVICE, Home.HOST, Home.PINNED]
