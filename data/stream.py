"""`Stream`: a source that can grow while it is read, and `Feed`: its segments as a loader takes them.

    stream.arrivals(place) ──> Arrivals ──poll──> Arrived: segment, place ──Feed: numbers, waits, idle time──> batcher
    from the start, or where a saved position says       a function of the data alone, never of when it came

The order of the segments must not depend on the times of their arrival: a job that is killed and resumed, and one that
finds everything there from the start, read the same rows in the same batches.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from bagpipe.config.sections import DataConfig
from bagpipe.types.schema import DataSchema
from data.clock import Clock, Clocked, clock_of
from data.columns import Columns
from data.source import Block, Segment, Source

__all__ = ["Arrivals", "Arrived", "ConfiguredStream", "Feed", "Stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A segment that has arrived.

    Attributes:
        segment: all of its rows are there.
        place: JSON-able; `Stream.arrivals` of it begin with this segment.
    """

    segment: Segment
    place: Mapping[str, Any]


class Arrivals(Protocol):
    """The segments of a stream in their order. One thread's.

    Attributes:
        is_over: nothing follows what `poll` has returned.
    """

    is_over: bool

    def poll(self) -> Arrived | None:
        """The next segment; None: it has not arrived. Does not wait for it.

        Raises:
            InputError: what has arrived cannot be read, or breaks the order.
        """
        ...

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """The blocks of a segment, see `data.source.Source.blocks`."""
        ...

    def end(self) -> None:
        """Let `poll` return what is there now, and nothing that comes later."""
        ...

    def stop(self) -> None:
        """Let `blocks` end with a RuntimeError where it waits. From any thread."""
        ...

    def close(self) -> None:
        """Release what reading needs. Idempotent."""
        ...


class Stream(ABC):
    """A `data.source.Source` whose segments arrive. `segments` and `count_rows` know what is there now.

    Attributes:
        name: of the data, in messages.
    """

    __slots__ = ()

    name: str

    @abstractmethod
    def arrivals(self, place: Mapping[str, Any] | None) -> Arrivals:
        """The segments from the start, or from a place on.

        Raises:
            InputError: there is no such place, or its data is gone.
        """

    @property
    @abstractmethod
    def poll_s(self) -> float:
        """Seconds between two looks for more."""

    @property
    @abstractmethod
    def idle_s(self) -> float:
        """The stream ends if nothing comes for so long; 0: it does not."""

    @property
    @abstractmethod
    def bad_rows(self) -> str: ...

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """Files that do not change while the stream grows: dictionaries."""

    @property
    @abstractmethod
    def schema(self) -> DataSchema: ...

    @property
    @abstractmethod
    def in_processes(self) -> bool: ...

    @property
    @abstractmethod
    def multi_hot(self) -> frozenset[str]: ...

    @property
    @abstractmethod
    def layout(self) -> str: ...

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]: ...

    @abstractmethod
    def blocks(self, segment: Segment) -> Iterator[Block]: ...

    @abstractmethod
    def read(self, block: Block) -> Columns: ...

    @abstractmethod
    def locate(self, block: Block, row: int) -> str: ...

    @abstractmethod
    def count_rows(self, segment: Segment, at_most: int | None = None) -> int: ...


class ConfiguredStream(Stream):
    """A stream of a configuration, with the columns of a source that parses its segments.

    Attributes:
        config: the `data` section.
        parser: has the columns of all segments.
        longest_poll_s: most seconds between two looks for more.
    """

    __slots__ = ()

    config: DataConfig
    parser: Source
    longest_poll_s: ClassVar[float] = 1.0

    @property
    def poll_s(self) -> float:
        return min(self.longest_poll_s, self.config.stream_wait_s)

    @property
    def idle_s(self) -> float:
        return self.config.stream_idle_s

    @property
    def bad_rows(self) -> str:
        return self.parser.bad_rows

    @property
    def rules(self) -> Any:
        """Of the columns, in formats with strings; None: there are none."""
        return getattr(self.parser, "rules", None)

    @property
    def clock(self) -> Clock | None:
        """See `data.clock.Clocked`."""
        return self.parser.clock if isinstance(self.parser, Clocked) else None

    @property
    def reads_times(self) -> bool:
        """See `data.clock.Clocked`."""
        return clock_of(self.parser) is not None

    def with_times(self) -> ConfiguredStream:
        """See `data.clock.Clocked`."""
        assert isinstance(self.parser, Clocked), "there is a clock"
        return dataclasses.replace(self, parser=self.parser.with_times())  # type: ignore[type-var]

    @property
    def files(self) -> tuple[str, ...]:
        return () if self.rules is None else tuple(self.rules.dictionaries)

    @property
    def schema(self) -> DataSchema:
        return self.parser.schema

    @property
    def in_processes(self) -> bool:
        return self.parser.in_processes

    @property
    def multi_hot(self) -> frozenset[str]:
        return self.parser.multi_hot


class Feed:
    """The arrivals of one loader. Its batcher thread polls and waits; any thread asks for places and closes.

    Args:
        stream: the data.
        place: of the first segment; None: the start.
        first: number of the first segment.
        clock: seconds.

    Raises:
        InputError: see `Stream.arrivals`.
    """

    def __init__(
        self,
        stream: Stream,
        place: Mapping[str, Any] | None,
        first: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = stream.name
        self._arrivals = stream.arrivals(place)
        self._poll_s, self._idle_s = stream.poll_s, stream.idle_s
        self._clock = clock
        self._empty_since_s: float | None = None  # the first poll without a segment since the last one with one
        self._next = first
        self._places: dict[int, Mapping[str, Any]] = {} if place is None else {first: place}
        self._closed = threading.Event()

    def poll(self) -> tuple[int, Segment] | None:
        """The next segment with its number; None: it has not arrived, or there is none (`is_over`)."""
        arrived = self._arrivals.poll()
        if arrived is None and self._is_idle():
            self._arrivals.end()
            arrived = self._arrivals.poll()
        if arrived is None:
            return None
        number, self._next = self._next, self._next + 1
        self._places[number] = arrived.place
        self._empty_since_s = None
        return number, arrived.segment

    def _is_idle(self) -> bool:
        """Whether nothing has come for the idle time. Nobody polls while queues are full: that time does not count."""
        now_s = self._clock()
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        return self._idle_s > 0 and now_s - self._empty_since_s >= self._idle_s

    @property
    def is_over(self) -> bool:
        """Nothing follows what `poll` has returned."""
        return self._arrivals.is_over

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """The blocks of a segment, in order."""
        return self._arrivals.blocks(segment)

    def wait(self) -> None:
        """Wait until it is time to poll again. RuntimeError once the feed is closed."""
        if self._closed.wait(self._poll_s):
            raise RuntimeError("the feed was closed")

    def place(self, number: int) -> Mapping[str, Any] | None:
        """The place of a segment; those before it are forgotten. None: it has not arrived."""
        for earlier in [known for known in tuple(self._places) if known < number]:
            del self._places[earlier]
        return self._places.get(number)

    def close(self) -> None:
        """End a wait. Idempotent."""
        self._closed.set()
        self._arrivals.stop()

    def release(self) -> None:
        """Release what reading needs, when the batcher thread has ended."""
        self._arrivals.close()
