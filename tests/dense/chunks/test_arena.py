from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bagpipe.dense.chunks.arena import Arena, Part
from bagpipe.pipeline.stream import NullStreams
from bagpipe.testing.recording_streams import RecordingStreams
from tests.dense.chunks.poison import PoisonedArena

CPU = torch.device("cpu")


@pytest.fixture(params=[Arena, PoisonedArena], ids=["plain", "poisoned"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    made: Arena = request.param(256, 2, device=CPU, streams=NullStreams())
    made.lane.open()
    yield made
    made.lane.close()


def place(arena: Arena, *values: float) -> list[torch.Tensor]:
    """One tensor a chunk, at byte 8."""
    tensors = [torch.full((4, 5), value) for value in values]
    for chunk, tensor in enumerate(tensors):
        arena.place(tensor, Part.of(tensor, chunk, 8))
    return tensors


def test_tensors_follow_their_chunk_and_keep_what_was_written(arena: Arena) -> None:
    first, second, third = place(arena, 1, 2, 3)
    for round_ in range(4):
        for chunk, tensor in ((0, first), (1, second), (2, third)):
            if not arena.has_room:
                arena.leave(min(arena.held))
            arena.come(chunk) if chunk not in arena.held else None
            arena.use(chunk, writes=True)
            assert arena.find(tensor) == (chunk, 8)
            tensor.add_(10)
            assert tensor.unique().tolist() == [chunk + 1 + 10 * (round_ + 1)]
    arena.go_home()
    assert [tensor.unique().tolist() for tensor in (first, second, third)] == [[41], [42], [43]]
    assert arena.held == frozenset()
    assert arena.peak_bytes == 512


def test_a_chunk_that_has_not_changed_is_not_copied_back() -> None:
    arena = Arena(256, 1, device=CPU, streams=NullStreams())
    (first,) = place(arena, 1)
    for writes in (False, True):
        arena.come(0)
        arena.use(0, writes=writes)
        arena.leave(0)
        assert arena.lane.num_copies == {"device": 1 + writes, "host": int(writes)}
    arena.drop(0)
    arena.come(0)
    arena.leave(0)
    assert arena.lane.num_copies == {"device": 2, "host": 1}
    arena.settle()
    assert first.unique().tolist() == [1]
    arena.lane.close()


def test_a_tensor_at_home_is_told_from_others(arena: Arena) -> None:
    (first,) = place(arena, 1)
    with pytest.raises(LookupError):
        arena.find(first)
    assert arena.find(torch.zeros(2)) is None


def test_on_a_device_moves_and_uses_are_ordered_by_events() -> None:
    """A move waits for the work enqueued before it, a use for its move; no thread waits before the end."""
    streams = RecordingStreams()
    arena = Arena(256, 1, device=CPU, streams=streams)
    place(arena, 1, 2)
    arena.lane.open()
    for chunk in (0, 1):
        arena.come(chunk)
        arena.use(chunk, writes=True)
        arena.leave(chunk)
    arena.settle()
    assert streams.log[:5] == [
        ("main", "record", "main#0"),  # order to come
        ("chunks", "wait", "main#0"),
        ("chunks", "record", "chunks#0"),
        ("main", "wait", "chunks#0"),  # use
        ("main", "record", "main#1"),  # order to leave
    ]
    moves = [event for lane, call, event in streams.log if (lane, call) == ("chunks", "wait")]
    assert moves == [f"main#{number}" for number in range(4)]
    assert not any(call in ("host-wait", "synchronize") for _, call, _ in streams.log)
    arena.lane.close()
