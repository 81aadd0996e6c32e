"""Staging memory with simulated copies: areas are filled only after their copies, and host copies stay intact."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagpipe.cache.staging import ALIGN_BYTES, HostCopy, Scratch, StagingRing, copy_to_host, empty_view, to_host
from bagpipe.kernels.torch_kernels import gather
from bagpipe.pipeline.stream import HostStream, NullStreams
from bagpipe.testing.recording_streams import RecordingStreams


@dataclass(eq=False)
class Copy:
    """An event that completes when a thread waits for it, or when the test says so."""

    done: bool = False
    num_waits: int = 0

    def synchronize(self) -> None:
        self.num_waits += 1
        self.done = True

    def query(self) -> bool:
        return self.done


class CopyStream(HostStream):
    records = True

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def record(self) -> Copy:
        self.copies.append(Copy())
        return self.copies[-1]


@dataclass
class LateStreams(NullStreams):
    """Streams whose work completes only when a thread waits for it."""

    is_async = True
    current: CopyStream = field(default_factory=CopyStream)
    num_allocated: int = 0

    def here(self) -> CopyStream:
        return self.current

    def memory(self, num_bytes: int) -> Tensor:
        self.num_allocated += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 5 << 20)), max_size=30))
def test_an_area_is_never_filled_before_its_copy_is_done(num_areas: int, batches: list[tuple[bool, int]]) -> None:
    """`batches`: for each batch, whether the oldest copy is done, and its size in bytes."""
    ring = StagingRing(LateStreams(), num_areas)
    under_way: list[tuple[int, Copy]] = []
    for oldest_is_done, num_bytes in batches:
        if oldest_is_done and under_way:
            under_way[0][1].done = True
        area = ring.take()
        for address, copy in under_way:
            assert copy.done or address != area.memory.data_ptr()
        under_way = [(address, copy) for address, copy in under_way if not copy.done]
        assert len(under_way) < num_areas
        ring.need(num_bytes)
        copy = Copy()
        area.copied = copy
        under_way.append((area.memory.data_ptr(), copy))


def test_a_ring_as_long_as_the_batches_in_flight_never_waits() -> None:
    """As in the schedule: batch b is staged after the copy of batch b - 3."""
    ring = StagingRing(LateStreams(), 3)
    copies = [Copy() for _ in range(20)]
    for batch, copy in enumerate(copies):
        if batch >= 3:
            copies[batch - 3].done = True
        ring.take().copied = copy
    assert ring.num_waits == 0
    assert not any(copy.num_waits for copy in copies)


def test_areas_grow_once_and_stay() -> None:
    streams = LateStreams()
    ring = StagingRing(streams, 2)
    sizes = []
    for num_bytes in (100, 3 << 20, 3 << 20, 2 << 20, 100, 3 << 20):
        sizes.append(len(ring.take()))
        ring.need(num_bytes)
    assert sizes == [1 << 20, 1 << 20, *[4 << 20] * 4]  # a quarter more than needed, rounded up to whole units
    assert ring.num_bytes == 8 << 20
    assert streams.num_allocated == 2 * (1 << 20) + 8 * (1 << 20)


def test_a_ring_has_areas() -> None:
    with pytest.raises(ValueError, match="num_areas must be at least 1, got 0"):
        StagingRing(NullStreams(), 0)


@pytest.mark.parametrize("streams", [LateStreams(), NullStreams()])
def test_copies_have_the_values_of_their_call(streams: NullStreams) -> None:
    """Any shape and dtype: contiguous copies in one block of memory, with at most one event."""
    tied = torch.arange(3, dtype=torch.float64)
    tensors = {
        "turned": torch.arange(6, dtype=torch.float32).view(2, 3).t(), "count": torch.tensor(7),
        "none": torch.empty(0, 4), "half": torch.ones(5, dtype=torch.bfloat16, requires_grad=True),
        "one": tied, "other": tied,
    }  # fmt: skip
    expected = {name: tensor.tolist() for name, tensor in tensors.items()}
    copies = copy_to_host(streams, tensors)
    for tensor in tensors.values():
        tensor.detach().zero_()
    if isinstance(streams, LateStreams):
        assert [copy.num_waits for copy in streams.current.copies] == [0]
        assert streams.num_allocated == 5 * ALIGN_BYTES
    found = copies.get()
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())
    assert len({tensor.data_ptr() for tensor in found.values() if tensor.numel()}) == 5
    if isinstance(streams, LateStreams):
        assert [copy.num_waits for copy in streams.current.copies] == [1]


def test_another_stream_can_wait_for_the_copies() -> None:
    streams = RecordingStreams()
    copies = copy_to_host(streams, {"one": torch.ones(1)})
    copies.order()
    assert streams.log == [("main", "record", "main#0"), ("main", "wait", "main#0")]
    copy_to_host(NullStreams(), {}).order()


def test_a_copy_is_done_when_its_event_is_done() -> None:
    streams = LateStreams()
    there = torch.arange(6, dtype=torch.float64).view(2, 3).t()
    arrival = to_host(streams, there)
    (copy,) = streams.current.copies
    assert not arrival.is_ready()
    assert copy.num_waits == 0
    there.zero_()  # later work of the same stream
    assert arrival.get().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copy.num_waits == 1
    assert arrival.is_ready()


def test_copies_have_separate_memory() -> None:
    """Store, journal and checkpoint can hold their copies for any time."""
    streams = LateStreams()
    arrivals = [HostCopy(streams, torch.full((4,), float(batch))) for batch in range(50)]
    assert [arrival.get()[3].item() for arrival in arrivals] == list(range(50))


def test_on_a_cpu_no_copy_is_made() -> None:
    tensor = torch.ones(3, requires_grad=True)
    arrival = to_host(NullStreams(), tensor)
    assert arrival.is_ready()
    assert arrival.get().data_ptr() == tensor.data_ptr()
    assert not arrival.get().requires_grad


def test_a_host_copy_can_be_read_in_another_thread() -> None:
    arrival = to_host(LateStreams(), torch.ones(2))
    found: list[list[float]] = []
    reader = threading.Thread(target=lambda: found.append(arrival.get().tolist()))
    reader.start()
    reader.join()
    assert found == [[1.0, 1.0]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.bfloat16])
def test_views_of_staging_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = torch.zeros(3 * ALIGN_BYTES, dtype=torch.uint8)
    view = empty_view(memory, ALIGN_BYTES, shape, dtype)
    assert (view.shape, view.dtype) == (shape, dtype)
    view.fill_(1)
    assert not memory[:ALIGN_BYTES].any()
    assert not memory[2 * ALIGN_BYTES :].any()


def test_gather_into_scratch() -> None:
    records = torch.arange(24, dtype=torch.float64).view(4, 6)
    scratch = Scratch(torch.device("cpu"))
    first = gather(records, torch.tensor([3, 0]), 4, scratch.take(2, 4, torch.float64))
    assert first.tolist() == [[18.0, 19.0, 20.0, 21.0], [0.0, 1.0, 2.0, 3.0]]
    again = scratch.take(1, 5, torch.float64)
    assert again.data_ptr() == first.data_ptr()  # the same memory, as long as it is large enough
    assert scratch.take(100, 5, torch.float16).shape == (100, 5)
    assert scratch.take(0, 5, torch.float32).shape == (0, 5)
