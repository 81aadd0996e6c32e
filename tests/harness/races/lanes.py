"""`WatchedStreams`: streams that record every operator of every lane and pass clocks between the lanes' threads.

lane A  record() ──> `Handover`: A's event, if it has one, and what A's thread knows
lane B  wait(Handover): B's stream, or thread, waits for the event; B's thread knows what A's thread knew
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from bagpipe.pipeline.stream import Event, Mark, Stream, Streams
from bagpipe.schedule.ir.program import Resource
from tests.harness.races.clocks import Clock
from tests.harness.races.history import History

__all__ = ["Handover", "OperatorMode", "WatchedStreams"]


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator called by the thread that entered it, in forward and backward."""

    def __init__(self, history: History) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._history.operator(func, args, kwargs, result)
        return result


def _is_watched() -> bool:
    """The calling thread is in an `OperatorMode`."""
    return any(isinstance(mode, OperatorMode) for mode in _get_current_dispatch_mode_stack())


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """End of an action.

    Attributes:
        lane: name of the lane.
        event: of the lane's stream; None: it has none.
        known: clock of the lane's thread.
    """

    lane: str
    event: Event | None
    known: Clock

    def synchronize(self) -> None:
        """See `bagpipe.pipeline.stream.Event`."""
        if self.event is not None:
            self.event.synchronize()

    def query(self) -> bool:
        """See `bagpipe.pipeline.stream.Event`."""
        return self.event is None or self.event.query()


class WatchedStreams:
    """Watched streams of a device.

    Args:
        inner: the streams.
        memory: implements `Streams.memory`.
        history: records all calls.
    """

    def __init__(self, inner: Streams, memory: Callable[[int], Any], history: History) -> None:
        self.is_async = inner.is_async
        self.memory = memory
        self.origin = inner.origin
        self._inner = inner
        self._history = history

    def stream(self, resource: Resource) -> Stream:
        return _WatchedStream(self._inner.stream(resource), resource.name, self._history)

    def here(self) -> Stream:
        return _Here(self._inner.here(), self._history)


class _Here:
    """The current stream."""

    records = True

    def __init__(self, inner: Stream, history: History) -> None:
        self._inner = inner
        self._history = history

    @property
    def key(self) -> object:
        return self._inner.key

    def current(self) -> AbstractContextManager[Any]:
        return self._inner.current()

    def record(self) -> Event | None:
        return self._inner.record()

    def mark(self) -> Mark | None:
        return self._inner.mark()

    def wait(self, event: Event) -> None:
        if isinstance(event, Handover):
            self._history.learn(event.known)
        inner = event.event if isinstance(event, Handover) else event
        if inner is not None:
            self._inner.wait(inner)

    def synchronize(self) -> None:
        self._inner.synchronize()


class _WatchedStream(_Here):
    """Stream of one lane. Always returns events, so that host lanes pass on their clock."""

    def __init__(self, inner: Stream, lane: str, history: History) -> None:
        super().__init__(inner, history)
        self._lane = lane
        self._made_by = history.knowledge()

    @contextmanager
    def current(self) -> Iterator[None]:
        self._history.introduce(self._made_by)
        # The thread that steps a run is watched already; two modes would record each operator twice.
        mode = nullcontext() if _is_watched() else OperatorMode(self._history)
        with mode, self._inner.current():
            self._history.stream.name = f"lane {self._lane}"
            yield

    def record(self) -> Event | None:
        event = self._inner.record() if self._inner.records else None
        return Handover(self._lane, event, self._history.knowledge())
