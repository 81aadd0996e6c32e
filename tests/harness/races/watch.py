"""`watch`: makes the device type ``cpu`` a modelled CUDA device and records everything on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bagpipe.cache.staging import Area, HostCopies, HostCopy, StagingRing
from bagpipe.pipeline import devices, stream
from bagpipe.pipeline.cuda_stream import CudaStreams
from tests.harness.races.communicators import model_communicators
from tests.harness.races.device import ModelledCuda
from tests.harness.races.history import History
from tests.harness.races.lanes import OperatorMode, WatchedStreams
from tests.harness.races.report import Race

__all__ = ["RacesFound", "Watch", "watch"]


class RacesFound(AssertionError):
    """Unordered accesses of memory."""


class Watch:
    """Record of a watched run.

    Attributes:
        history: all events.
        cuda: replaces `torch.cuda`.
        ring_waits: requests of a staging area whose copy was not known to be done.
    """

    def __init__(self) -> None:
        self.history = History()
        self.cuda = ModelledCuda(self.history)
        self.ring_waits = 0

    @property
    def races(self) -> list[Race]:
        return self.history.races

    def check(self) -> None:
        """Check that there is no race.

        Raises:
            RacesFound: names the first few races, with both accesses of each.
        """
        if self.races:
            kinds = {(race.actions, race.is_reuse): race for race in self.races}
            words = "\n".join(str(race) for race in list(kinds.values())[:8])
            raise RacesFound(f"{len(self.races)} races, of {len(kinds)} pairs of actions:\n{words}")


@contextmanager
def watch() -> Iterator[Watch]:
    """Watch all lanes of the engines made and run inside, and the calling thread."""
    found = Watch()
    with ExitStack() as stack:
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "synchronize"):
            stack.enter_context(patch.object(torch.cuda, name, getattr(found.cuda, name)))
        stack.enter_context(
            patch.dict(
                devices.STREAMS,
                cpu=lambda device: WatchedStreams(CudaStreams("cuda"), found.cuda.empty_pinned, found.history),
            )
        )
        stack.enter_context(patch.dict(stream._KEEP, cpu=found.cuda.record_stream))
        stack.enter_context(patch.object(StagingRing, "take", _take(found)))
        stack.enter_context(patch.object(HostCopy, "get", _get(found)))
        stack.enter_context(patch.object(HostCopies, "get", _get_all(found)))
        stack.enter_context(model_communicators(found.history, found.cuda))
        stack.enter_context(OperatorMode(found.history))
        yield found


def _take(found: Watch) -> Any:
    """`StagingRing.take`, followed by the host's write into the area."""
    original = StagingRing.take

    def take(ring: StagingRing) -> Area:
        before = ring.num_waits
        area = original(ring)
        with found.history.lock:
            found.ring_waits += ring.num_waits - before
        found.history.host_access(area.memory, writes=True)
        return area

    return take


def _get(found: Watch) -> Any:
    """`HostCopy.get`, followed by the host's read of the tensor."""
    original = HostCopy.get

    def get(copy: HostCopy) -> Tensor:
        tensor = original(copy)
        found.history.host_access(tensor, writes=False)
        return tensor

    return get


def _get_all(found: Watch) -> Any:
    """`HostCopies.get`, followed by the host's read of all tensors."""
    original = HostCopies.get

    def get(copies: HostCopies) -> Mapping[str, Tensor]:
        tensors = original(copies)
        for tensor in tensors.values():
            found.history.host_access(tensor, writes=False)
        return tensors

    return get
