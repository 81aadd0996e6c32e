"""`LaggingStreams`: a device that makes progress only when a thread waits for it, which exposes every wait.

    record ──> event with its stream's clock     wait: the stream joins that clock     synchronize: that work is done

The CPU still does the work immediately. Inside lanes, everything that would make a thread wait for a device is
recorded: operators, and events other than those that the lane waits for before an action.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bagpipe.pipeline.stream import Mark, Origin
from bagpipe.schedule.ir.program import Resource

__all__ = ["LaggingStreams"]

#: Operators whose result, or its size, the host must know.
_OPERATORS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "nonzero_numpy",
        "repeat_interleave.Tensor", "unique_consecutive", "unique_dim", "_unique", "_unique2", "bincount",
    )
}  # fmt: skip
#: Tensor methods with the same effect that call no operator on a CPU.
_METHODS = (Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__)


class _Event:
    def __init__(self, stream: _Stream, *, holds_threads: bool) -> None:
        stream.clock[stream.key] = stream.clock.get(stream.key, 0) + 1
        self.key = stream.key
        self.clock = dict(stream.clock)
        self.holds_threads = holds_threads
        self._streams = stream.streams

    def query(self) -> bool:
        return self._streams.done.get(self.key, 0) >= self.clock[self.key]

    def synchronize(self) -> None:
        if not self.query():
            self._streams.note("an event")
        self._streams.wait_for(self.clock)


class _Stream:
    records = True

    def __init__(self, streams: LaggingStreams, resource: Resource, *, is_here: bool = False) -> None:
        self.key: object = resource.name
        self.streams = streams
        self.clock = streams.clocks.setdefault(resource.name, {})
        self._resource = resource
        self._holds = not resource.on_device and not is_here

    @contextmanager
    def current(self) -> Iterator[None]:
        self.streams.local.resource = self._resource
        with _Methods(self.streams), _Operators(self.streams):
            yield

    def record(self) -> _Event:
        return _Event(self, holds_threads=not self._holds)

    def mark(self) -> Mark | None:
        return None

    def wait(self, event: _Event) -> None:
        if self._holds and event.holds_threads:
            self.streams.wait_for(event.clock)  # scheduled wait
        else:
            _merge(self.clock, event.clock)

    def synchronize(self) -> None:
        self.streams.wait_for(self.clock)


class LaggingStreams:
    """Streams of a device with unbounded lag. For one run.

    Args:
        allowed: tensors that live on the host, such as an optimizer's step counts.

    Attributes:
        watches: record calls inside lanes.
        found: forbidden waits: lane, operator, location.
        done: completed events by stream.
    """

    is_async = True

    def __init__(self, allowed: Callable[[], list[Tensor]] = list) -> None:
        self.watches = False
        self.found: list[str] = []
        self.done: dict[object, int] = {}
        self.clocks: dict[str, dict[object, int]] = {}
        self.local = threading.local()
        self._lock = threading.Lock()
        self._allowed = allowed
        self._memory: list[Tensor] = []

    def stream(self, resource: Resource) -> _Stream:
        return _Stream(self, resource)

    def here(self) -> _Stream:
        return _Stream(self, getattr(self.local, "resource", Resource(name="main", kind="gpu")), is_here=True)

    def memory(self, num_bytes: int) -> Tensor:
        self._memory.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._memory[-1]

    def origin(self) -> Origin | None:
        return None

    def wait_for(self, clock: dict[object, int]) -> None:
        """The calling thread waits until all events of the clock are done."""
        with self._lock:
            _merge(self.done, clock)

    def note(self, what: str, *tensors: Any) -> None:
        is_lane = hasattr(self.local, "resource")  # the checkpoint thread is allowed to wait
        if (
            self.watches
            and is_lane
            and not any(isinstance(tensor, Tensor) and self._is_host(tensor) for tensor in tensors)
        ):
            frames = [
                f for f in traceback.extract_stack() if "/bagpipe/" in f.filename or "/torch/optim/" in f.filename
            ]
            where = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames[-4:]))
            self.found.append(f"{getattr(self.local, 'resource', None)}: {what} at {where}")

    def _is_host(self, tensor: Tensor) -> bool:
        """Whether the tensor would be host memory next to a real device, too."""
        address = tensor.data_ptr()
        return any(t.data_ptr() <= address < t.data_ptr() + len(t) for t in self._memory) or any(
            address == allowed.data_ptr() for allowed in self._allowed()
        )


class _Operators(TorchDispatchMode):
    def __init__(self, streams: LaggingStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _OPERATORS or f"{func._schema.name}.{func._overloadname}" in _OPERATORS:
            self._streams.note(func._schema.name, *args)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, streams: LaggingStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self._streams.note(func.__name__, *args)
        return func(*args, **(kwargs or {}))


def _merge(clock: dict[object, int], other: dict[object, int]) -> None:
    for key, count in other.items():
        clock[key] = max(clock.get(key, 0), count)
