"""The modelled device: ordering by each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from tests.harness.races.device import ModelledCuda, ModelledStream
from tests.harness.races.history import History
from tests.harness.races.lanes import OperatorMode


class _Device:
    def __init__(self) -> None:
        self.history = History()
        self.cuda = ModelledCuda(self.history)
        self.first, self.second = self.cuda.Stream(), self.cuda.Stream()

    def add(self, stream: ModelledStream, tensor: Tensor) -> None:
        """Enqueue work on a stream that changes the tensor."""
        with OperatorMode(self.history), self.cuda.stream(stream):
            tensor.add_(torch.zeros(4, device="cpu"))

    @property
    def num_races(self) -> int:
        return len({(race.first.place, race.second.place) for race in self.history.races})


def _event_wait(device: _Device) -> None:
    device.second.wait_event(device.first.record_event())


def _current_event(device: _Device) -> None:
    event = device.cuda.Event()
    with device.cuda.stream(device.first):
        event.record()
    with device.cuda.stream(device.second):
        event.wait()


def _old_event(device: _Device) -> None:
    event = device.cuda.Event()
    device.second.wait_event(event)  # nothing was recorded
    event.record(device.first)


def _asked(device: _Device) -> None:
    """Check that the event is not done: a device can always be late."""
    assert not device.first.record_event().query()


def _asked_when_known(device: _Device) -> None:
    event = device.first.record_event()
    device.first.record_event().synchronize()
    assert event.query()


#: Ways to order the second stream's work after the first's, and whether they do.
ORDERS: Mapping[str, tuple[Callable[[_Device], object], bool]] = {
    "nothing": (lambda device: None, False),
    "a wait for an event": (_event_wait, True),
    "the current streams' event": (_current_event, True),
    "a wait for the stream": (lambda device: device.second.wait_stream(device.first), True),
    "the wrong way round": (lambda device: device.first.wait_stream(device.second), False),
    "an event recorded later": (_old_event, False),
    "an event of another stream": (lambda device: device.second.wait_event(device.second.record_event()), False),
    "the thread waits for the event": (lambda device: device.first.record_event().synchronize(), True),
    "the thread waits for the stream": (lambda device: device.first.synchronize(), True),
    "the thread waits for the other stream": (lambda device: device.second.synchronize(), False),
    "the thread waits for all": (lambda device: device.cuda.synchronize(), True),
    "an event that may not be over": (_asked, False),
    "a later event that is over": (_asked_when_known, True),
}


@pytest.mark.parametrize("name", ORDERS)
def test_ordering_of_two_streams(name: str) -> None:
    device, tensor = _Device(), torch.zeros(4)
    order, ordered = ORDERS[name]
    device.add(device.first, tensor)
    order(device)
    device.add(device.second, tensor)
    assert bool(device.num_races) is not ordered


def test_reading_a_device_value_waits() -> None:
    device, tensor = _Device(), torch.zeros(4)
    device.add(device.first, tensor)
    with OperatorMode(device.history), device.cuda.stream(device.first):
        assert float(tensor.sum()) == 0
    device.add(device.second, tensor)
    assert not device.num_races
    assert [name for name, _ in device.history.host_waits] == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_between_device_and_pinned_memory(non_blocking: bool) -> None:
    """The host reads the result of a non-blocking copy too early, and does not wait."""
    device, tensor = _Device(), torch.zeros(4)
    device.add(device.first, tensor)
    host = device.cuda.empty_pinned(16).view(torch.float32)
    with OperatorMode(device.history), device.cuda.stream(device.first):
        host.copy_(tensor, non_blocking=non_blocking)
    device.history.host_access(host, writes=False)
    assert bool(device.num_races) is non_blocking
    assert bool(device.history.host_waits) is not non_blocking


def test_work_on_pinned_memory_alone_runs_on_the_host() -> None:
    device = _Device()
    host = device.cuda.empty_pinned(16)
    with OperatorMode(device.history), device.cuda.stream(device.first):
        host.fill_(1)
    device.history.host_access(host, writes=False)
    assert not device.num_races
