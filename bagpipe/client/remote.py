"""`RemoteSteps`: the trainer's end of a cacher's socket. A thread receives and decodes; a bounded queue holds steps.

    socket ──receiver thread──> queue (at most `credits` steps) ──> steps()
                                              └── taking one sends an Ack: one more credit for the cacher
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagpipe.client.step import Phase, Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.proto.channel import Channel, Frame, Kind
from bagpipe.proto.codec import decode_step
from bagpipe.schema import DataSchema

__all__ = ["QueueStatistics", "RemoteSteps"]

_ERRORS: Mapping[str, type[Exception]] = {"InputError": InputError, "CapacityError": CapacityError}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatistics:
    """Steps received and not yet taken: now, at most so far, and the bound."""

    current: int
    peak: int
    maximum: int


class RemoteSteps:
    """A `StepSource` behind a channel.

    Args:
        channel: connected to a cacher.
        credits: steps under way or waiting here at most.
    """

    schema: DataSchema

    def __init__(self, channel: Channel, *, credits: int) -> None:
        if credits < 1:
            raise ValueError(f"credits must be at least 1, got {credits}")
        self._channel = channel
        self._credits = credits
        # Steps are bounded by the credits; one more place for END, ERROR or the end of the stream.
        self._received: queue.Queue[Frame | Step | None] = queue.Queue(maxsize=credits + 1)
        self._peak = 0
        self._skipped_rows = 0
        self._receiver = threading.Thread(target=self._receive, name="cacher-client", daemon=True)

    def open(self, data: DataConfig, seed: int) -> None:
        """Have the cacher open the data; sets `schema`.

        Raises:
            InputError: the data cannot be opened.
            JobError: the cacher died.
        """
        self._receiver.start()
        request = {"data": dataclasses.asdict(data), "seed": seed, "credits": self._credits}
        self._channel.send_json(Kind.OPEN, request)
        frame = self._next()
        if isinstance(frame, Step) or frame.kind is not Kind.SCHEMA:
            raise JobError("the cacher answered with something that is not a schema")
        self.schema = DataSchema.from_json(frame.json())

    def close(self) -> None:
        """Close the channel and end the receiver thread. Steps not taken are dropped."""
        self._channel.close()
        while self._receiver.is_alive():
            try:
                while True:
                    self._received.get_nowait()
            except queue.Empty:
                self._receiver.join(timeout=0.05)

    def steps(self, phase: Phase, spec: OracleSpec, *, max_steps: int = 0) -> Iterator[Step]:
        """Steps of a phase in batch order, see `StepSource`. Take them all, or close."""
        request = {"phase": phase, "spec": dataclasses.asdict(spec), "max_steps": max_steps}
        self._channel.send_json(Kind.START, request)
        while True:
            item = self._next()
            if isinstance(item, Step):
                self._acknowledge()
                yield item
            elif item.kind is Kind.END:
                self._skipped_rows = int(item.json()["skipped_rows"])
                return
            else:
                raise JobError(f"the cacher sent a {item.kind.name} frame in the middle of the steps")

    def skipped_rows(self) -> int:
        """Malformed rows skipped in the phases that have ended."""
        return self._skipped_rows

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(current=self._received.qsize(), peak=self._peak, maximum=self._credits)

    def _acknowledge(self) -> None:
        try:
            self._channel.send(Kind.ACK)
        except OSError:
            pass  # the cacher is gone; the next frame that is missing says so

    def _next(self) -> Frame | Step:
        item = self._received.get()
        if item is None:
            raise JobError("the cacher process ended unexpectedly")
        if isinstance(item, Frame) and item.kind is Kind.ERROR:
            value = item.json()
            raise _ERRORS.get(value["name"], JobError)(value["message"])
        return item

    def _receive(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                self._received.put(decode_step(frame.payload) if frame.kind is Kind.STEP else frame)
                self._peak = max(self._peak, self._received.qsize())
        except (OSError, ValueError):
            pass  # reported as the end of the stream, by whoever waits for the next frame
        finally:
            self._received.put(None)
