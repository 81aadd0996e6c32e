"""`RemoteSteps`: the trainer's end of a cacher's socket. A thread receives and decodes; a bounded queue holds steps.

socket ──receiver thread──> queue (at most `credits` steps) ──> steps()
                                          └── taking one sends an Ack: one more credit for the cacher
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bagpipe.client.step import Phase, Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.proto.channel import Channel, ChannelError, Frame, Kind
from bagpipe.proto.codec import CodecError, decode_step
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
        self._end = "the cacher process ended unexpectedly"
        self._skipped_rows = 0
        self._receiver = threading.Thread(target=self._receive, name="cacher-client", daemon=True)

    def open(self, data: DataConfig, seed: int) -> None:
        """Have the cacher open the data; sets `schema`.

        Raises:
            InputError: the data cannot be opened.
            JobError: the cacher died.
        """
        self._receiver.start()
        self._request(Kind.OPEN, {"data": dataclasses.asdict(data), "seed": seed, "credits": self._credits})
        frame = self._next()
        if isinstance(frame, Step) or frame.kind is not Kind.SCHEMA:
            kind = "STEP" if isinstance(frame, Step) else frame.kind.name
            raise JobError(f"the cacher answered with a {kind} frame, expected SCHEMA")
        self.schema = DataSchema.from_json(_json(frame))

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
        """Steps of a phase in batch order, see `StepSource`. Take them all, or close.

        Raises:
            InputError: the data is bad, or a batch does not fit the cache.
            JobError: the cacher died or failed.
        """
        self._request(Kind.START, {"phase": phase, "spec": dataclasses.asdict(spec), "max_steps": max_steps})
        while True:
            item = self._next()
            if isinstance(item, Step):
                self._acknowledge()
                yield item
            elif item.kind is Kind.END:
                self._skipped_rows = int(_json(item)["skipped_rows"])
                return
            else:
                raise JobError(f"the cacher sent a {item.kind.name} frame in the middle of the steps")

    def skipped_rows(self) -> int:
        """Malformed rows skipped in the phases that have ended."""
        return self._skipped_rows

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(current=self._received.qsize(), peak=self._peak, maximum=self._credits)

    def _request(self, kind: Kind, value: dict[str, Any]) -> None:
        # A cacher that is gone is met in the queue: what it said last, or that it ended.
        with suppress(OSError):
            self._channel.send_json(kind, value)

    def _acknowledge(self) -> None:
        with suppress(OSError):  # the same
            self._channel.send(Kind.ACK)

    def _next(self) -> Frame | Step:
        item = self._received.get()
        if item is None:
            self._received.put(None)  # the end stays the end, whoever asks again
            raise JobError(self._end)
        if isinstance(item, Frame) and item.kind is Kind.ERROR:
            value = _json(item)
            raise _ERRORS.get(value["name"], JobError)(value["message"])
        return item

    def _receive(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                self._received.put(decode_step(frame.payload) if frame.kind is Kind.STEP else frame)
                self._peak = max(self._peak, self._received.qsize())
        except (ChannelError, CodecError) as error:
            self._end = f"the cacher sent something that cannot be read: {error}"
        except OSError:
            pass  # a reset connection is a closed one
        finally:
            self._received.put(None)


def _json(frame: Frame) -> dict[str, Any]:
    try:
        return frame.json()
    except (ChannelError, ValueError) as error:
        raise JobError(f"the cacher sent a {frame.kind.name} frame that cannot be read: {error}") from None
