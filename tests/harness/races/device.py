"""`ModelledCuda`: replaces the streams and events of `torch.cuda` by a model.

The CPU does the work immediately. Only the order is modelled: what a CUDA device would have waited for, and what it
could have reordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.harness.races.clocks import Agent, Clock
from tests.harness.races.history import History

__all__ = ["ModelledCuda", "ModelledEvent", "ModelledStream"]


class ModelledStream:
    """Model of `torch.cuda.Stream`."""

    device = torch.device("cpu")

    def __init__(self, history: History, agent: Agent) -> None:
        self.agent = agent
        self._history = history

    @property
    def cuda_stream(self) -> int:
        """Identifies the stream."""
        return self.agent.number

    def record_event(self, event: ModelledEvent | None = None) -> ModelledEvent:
        event = event if event is not None else ModelledEvent(self._history)
        event.record(self)
        return event

    def wait_event(self, event: ModelledEvent) -> None:
        self._history.delay(self.agent, event.clock)

    def wait_stream(self, stream: ModelledStream) -> None:
        self._history.delay(self.agent, self._history.reached(stream.agent))

    def synchronize(self) -> None:
        self._history.learn(self._history.reached(self.agent))

    def query(self) -> bool:
        """False: a device can always be late."""
        return False


class ModelledEvent:
    """Model of `torch.cuda.Event` on a device as late as the program allows: done only when that is certain."""

    def __init__(self, history: History) -> None:
        self.clock = Clock()
        self._history = history

    def record(self, stream: ModelledStream | None = None) -> None:
        self.clock = self._history.reached(self._history.stream if stream is None else stream.agent)

    def wait(self, stream: ModelledStream | None = None) -> None:
        self._history.delay(self._history.stream if stream is None else stream.agent, self.clock)

    def synchronize(self) -> None:
        self._history.learn(self.clock)

    def query(self) -> bool:
        return self._history.knowledge().covers(self.clock)

    def elapsed_time(self, end: ModelledEvent) -> float:
        """Elapsed milliseconds, always 0: the model has no time."""
        return 0.0


class ModelledCuda:
    """The functions of `torch.cuda` that place work on streams.

    Args:
        history: records all calls.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._streams: dict[int, ModelledStream] = {}

    def Stream(self, device: object = None, priority: int = 0) -> ModelledStream:
        return self._of(self._history.agent("a stream"))

    def Event(self, enable_timing: bool = False, **kwargs: object) -> ModelledEvent:
        return ModelledEvent(self._history)

    @contextmanager
    def stream(self, stream: ModelledStream) -> Iterator[None]:
        before = self._history.switch(stream.agent)
        try:
            yield
        finally:
            self._history.switch(before)

    def current_stream(self, device: object = None) -> ModelledStream:
        return self._of(self._history.stream)

    def default_stream(self, device: object = None) -> ModelledStream:
        return self._of(self._history.default_stream)

    def synchronize(self, device: object = None) -> None:
        self._history.learn_all()

    def empty_pinned(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]`` of pinned memory."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._history.pin(tensor)
        return tensor

    def record_stream(self, tensor: Any) -> None:
        """``tensor.record_stream(torch.cuda.current_stream())``."""
        self._history.keep(tensor)

    def _of(self, agent: Agent) -> ModelledStream:
        return self._streams.setdefault(agent.number, ModelledStream(self._history, agent))
