"""`TopicArrivals`: the turns of a topic's partitions as they arrive, and their messages as blocks of lines.

turn ──all offsets there?──> Segment: partition, offsets ──messages──> Block with their text
end, or the time `until` ──> the leg is closed at the offsets there are: shorter turns, then it is over
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bagpipe.errors import InputError
from data.kafka_client import Client, lost
from data.source import Block, Segment
from data.stream import Arrived
from data.topic_order import Leg, leg_of

__all__ = ["TopicArrivals"]

#: Seconds after `until` at which it has passed for all brokers: clocks differ.
_CLOCK_S = 1.0


class TopicArrivals:
    """`data.stream.Arrivals` of a topic.

    Args:
        client: connected to it; closed by `close`.
        place: where to begin; None: at the lowest available offsets.
        run: offsets of a turn.
        until_s: messages later than this are not read, seconds since 1970; None: all are.
        now: seconds since 1970.

    Raises:
        InputError: `place` is none of the topic, or its messages are gone.
    """

    def __init__(
        self,
        client: Client,
        place: Mapping[str, Any] | None,
        *,
        run: int,
        until_s: float | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.is_over = False
        self._client = client
        self._run = run
        self._until_s = until_s
        self._now = now
        self._ends = False  # nothing that comes later is read
        self._number = 0
        try:
            count = client.num_partitions()
            marks = [client.watermarks(partition) for partition in range(count)]
            if place is None:
                self._leg = Leg(start=tuple(low for low, _ in marks), stop=None, run=run)
            else:
                self._leg, self._number = leg_of(place, client.name, count, run)
            offsets = self._leg.offsets(self._number)
            for partition, offset in enumerate(offsets):
                self._check_there(partition, offset, *marks[partition])
            client.begin(offsets, run)
        except BaseException:
            client.close()
            raise

    def poll(self) -> Arrived | None:
        """See `data.stream.Arrivals`."""
        if self._until_s is not None and not self._ends and self._now() >= self._until_s + _CLOCK_S:
            self.end()
        while self._leg.stop is not None:
            if self._number >= self._leg.num_turns():
                if self._ends:
                    self.is_over = True
                    return None
                self._leg, self._number = Leg(start=self._leg.stop, stop=None, run=self._run), 0
                break
            turn = self._leg.turn(self._number)
            if turn.start < turn.stop:
                return self._arrived()
            self._number += 1
        turn = self._leg.turn(self._number)
        return self._arrived() if self._client.has(turn.partition, turn.stop) else None

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """See `data.stream.Arrivals`: one block."""
        partition = int(segment.file.rpartition(" ")[2])
        values: list[bytes] = []
        for message in self._client.messages(partition, segment.stop):
            value = message.value() or b""
            line = value.removesuffix(b"\n").removesuffix(b"\r")
            if b"\n" in line:
                raise InputError(
                    f"{segment.file}, offset {message.offset()}: expected a message of one line, got a line break in it"
                )
            values.append(line)
        text = b"".join(line + b"\n" for line in values)
        yield Block(
            file=segment.file, start=segment.start, stop=segment.stop, num_rows=len(values), line=1, payload=text
        )

    def end(self) -> None:
        """See `data.stream.Arrivals`."""
        if self._ends or (self._leg.stop is not None and self._number < self._leg.num_turns()):
            return  # first what was there at an earlier end
        self._ends = True
        if self._leg.stop is not None:
            self._leg, self._number = Leg(start=self._leg.stop, stop=None, run=self._run), 0
        ends = []
        for partition in range(len(self._leg.start)):
            _, high = self._client.watermarks(partition)
            after = None if self._until_s is None else self._client.offset_after(partition, self._until_s)
            ends.append(high if after is None else min(high, after))
        self._leg = self._leg.closed(tuple(ends), self._number)

    def stop(self) -> None:
        """See `data.stream.Arrivals`."""
        self._client.stop()

    def close(self) -> None:
        """See `data.stream.Arrivals`."""
        self._client.close()

    def _arrived(self) -> Arrived:
        turn = self._leg.turn(self._number)
        place = self._leg.to_place(self._number)
        self._number += 1
        file = f"{self._client.name}, partition {turn.partition}"
        return Arrived(segment=Segment(file=file, start=turn.start, stop=turn.stop), place=place)

    def _check_there(self, partition: int, offset: int, low: int, high: int) -> None:
        """Check that a partition still has an offset. Raises InputError if it was deleted, or the topic is another."""
        if offset < low:
            raise lost(self._client.name, partition, offset, low)
        if offset > high:
            raise InputError(
                f"{self._client.name}, partition {partition}: expected at least offset {offset}, it ends at {high}: "
                f"it was read further, so it was made anew"
            )
