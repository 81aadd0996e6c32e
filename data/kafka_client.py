"""`Client`: what is asked of a topic, over confluent-kafka, an optional package.

    num_partitions, watermarks, offset after a time
    begin ──> all partitions are read; messages that come before their turn wait ──messages──> those of a partition

librdkafka reconnects by itself. Where no broker answers for `TIMEOUT_S`, a call fails with one line.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, Self

from bagpipe.errors import InputError, JobError
from bagpipe.util.documents import file_text

if TYPE_CHECKING:
    import confluent_kafka

__all__ = ["TIMEOUT_S", "Client", "client_settings"]

#: Seconds without an answer of any broker.
TIMEOUT_S = 30.0
#: Longest wait for messages, and for an answer, inside the client: it cannot be interrupted.
_STEP_S, _ANSWER_S = 0.5, 5.0
#: Messages taken at a time.
_MANY = 1000
#: Least bound of a partition's messages that wait for their turn. Beyond it the partition is paused.
_MOST_WAITING = 10_000

#: The client's own log: one line of the program says what is wrong.
_SILENT = logging.getLogger("bagpipe.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


def client_settings(brokers: str, path: str) -> tuple[tuple[str, str], ...]:
    """Settings of a client.

    Args:
        brokers: addresses, separated by commas.
        path: of a file with lines ``NAME=VALUE``, by librdkafka's names; empty: none.

    Raises:
        InputError: the file cannot be read, or a line is none.
    """
    settings = {"bootstrap.servers": brokers}
    if path:
        for number, line in enumerate(file_text(path, subject="data.kafka_config").splitlines(), start=1):
            name, equals, value = line.partition("=")
            if line.strip() and not line.lstrip().startswith("#"):
                if not equals:
                    raise InputError(f"{path}:{number}: expected NAME=VALUE, got a line without =")
                settings[name.strip()] = value.strip()
    return tuple(settings.items())


class Client:
    """A connection to one topic. A context manager; `close` is idempotent. One thread's.

    Args:
        name: of the topic, in messages.
        topic: the topic.
        settings: of librdkafka.

    Raises:
        InputError: the package is missing, or a setting is none.
    """

    def __init__(self, name: str, topic: str, settings: tuple[tuple[str, str], ...]) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise InputError(
                f"{name} needs the Python package confluent-kafka, which is not installed: pip install confluent-kafka"
            ) from None
        self.name = name
        self._kafka = confluent_kafka
        self._topic = topic
        self._problem = ""
        self._down_s: float | None = None  # since when no broker is connected, as far as is known
        # A fetch that waits at the broker holds up other questions on its connection.
        defaults = {"fetch.wait.max.ms": 100}
        own = {
            "group.id": "bagpipe",  # required by the client; it joins no group
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "error_cb": self._note,
        }
        try:
            self._consumer = confluent_kafka.Consumer({**defaults, **dict(settings), **own}, logger=_SILENT)
        except confluent_kafka.KafkaException as error:
            raise InputError(f"{name}: {error.args[0].str()}") from None
        # Of each partition: messages that wait for their turn, and the offset up to which all have come.
        self._waiting: tuple[deque[confluent_kafka.Message], ...] = ()
        self._known: list[int] = []
        self._most_waiting = _MOST_WAITING
        self._paused: set[int] = set()
        self._stopped = Event()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Let a call that waits end with a RuntimeError. From any thread."""
        self._stopped.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._consumer.close()

    def num_partitions(self) -> int:
        """Partitions of the topic.

        Raises:
            InputError: there is no such topic, or no broker answers.
        """
        try:
            found = self._consumer.list_topics(self._topic, timeout=TIMEOUT_S).topics[self._topic]
        except self._kafka.KafkaException as error:
            raise InputError(f"{self.name}: {self._reason(error.args[0])}") from None
        if found.error is not None:
            raise InputError(f"{self.name}: no such topic: {found.error.str()}")
        if sorted(found.partitions) != list(range(len(found.partitions))):
            raise InputError(f"{self.name}: expected partitions from 0 on, got {sorted(found.partitions)}")
        return len(found.partitions)

    def watermarks(self, partition: int) -> tuple[int, int]:
        """The lowest available offset of a partition, and the offset of its next message.

        Raises:
            JobError: no broker answers.
        """
        where = self._kafka.TopicPartition(self._topic, partition)
        low, high = self._asked(lambda: self._consumer.get_watermark_offsets(where, timeout=_ANSWER_S))
        return low, high

    def has(self, partition: int, stop: int) -> bool:
        """All messages of a partition before an offset have come. Does not wait for them.

        Raises:
            InputError: messages were deleted before they were read.
            JobError: no broker answers.
        """
        while self._fetch(0) and self._known[partition] < stop:
            pass
        if self._down_s is not None and time.monotonic() - self._down_s > TIMEOUT_S:
            self._down_s = None
            self.watermarks(partition)
        return self._known[partition] >= stop

    def offset_after(self, partition: int, time_s: float) -> int | None:
        """The offset of a partition's first message after a time (seconds since 1970); None: there is none.

        Raises:
            JobError: no broker answers.
        """
        where = self._kafka.TopicPartition(self._topic, partition, int(time_s * 1000) + 1)
        [found] = self._asked(lambda: self._consumer.offsets_for_times([where], timeout=_ANSWER_S))
        return int(found.offset) if found.offset >= 0 else None

    def begin(self, offsets: Sequence[int], run: int) -> None:
        """Begin to read each partition at an offset, in turns of `run` offsets."""
        self._most_waiting = max(_MOST_WAITING, 2 * run)  # of a paused partition the next turn is there
        self._waiting = tuple(deque() for _ in offsets)
        self._known = list(offsets)
        places = [self._kafka.TopicPartition(self._topic, number, offset) for number, offset in enumerate(offsets)]
        self._consumer.assign(places)

    def messages(self, partition: int, stop: int) -> list[confluent_kafka.Message]:
        """The next messages of a partition, up to an offset before which all are there. Offsets can be missing.

        Raises:
            InputError: they are not there any more.
            JobError: no broker answers.
        """
        found: list[confluent_kafka.Message] = []
        waiting, latest_s = self._waiting[partition], time.monotonic()
        while True:
            while waiting and (waiting[0].offset() or 0) < stop:
                found.append(waiting.popleft())
            if waiting or self._known[partition] >= stop:
                break
            if self._stopped.is_set():
                raise RuntimeError("the client was stopped")
            if self._fetch(_STEP_S):
                latest_s = time.monotonic()
            elif time.monotonic() - latest_s > TIMEOUT_S:
                where = f"partition {partition}, offset {self._known[partition]}"
                raise JobError(f"{self.name}, {where}: no message came for {TIMEOUT_S:g} s {self._problem}".rstrip())
        if partition in self._paused and len(waiting) < self._most_waiting // 2:
            self._paused.discard(partition)
            self._consumer.resume([self._kafka.TopicPartition(self._topic, partition)])
        return found

    def _fetch(self, timeout_s: float) -> bool:
        """Take what has come, of any partition; wait so long for it. False: nothing has."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return False
        self._down_s = None
        for message in (first, *self._consumer.consume(_MANY, timeout=0)):
            partition, offset = message.partition(), message.offset()
            if message.error() is not None:
                self._heed(message)
            elif partition is not None and offset is not None:
                self._waiting[partition].append(message)
                self._known[partition] = offset + 1
                if len(self._waiting[partition]) > self._most_waiting and partition not in self._paused:
                    self._paused.add(partition)
                    self._consumer.pause([self._kafka.TopicPartition(self._topic, partition)])
        return True

    def _heed(self, event: confluent_kafka.Message) -> None:
        """Note an event that is no message."""
        error, partition, offset = event.error(), event.partition(), event.offset()
        assert error is not None, "an event"
        if partition is None or partition < 0:  # of connections
            self._note(error)
            if error.fatal():
                raise JobError(f"{self.name}: {error.str()}")
        elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
            self._known[partition] = max(self._known[partition], offset or 0)
        elif (low := self.watermarks(partition)[0]) > self._known[partition]:
            raise lost(self.name, partition, self._known[partition], low)
        elif not error.retriable():
            raise JobError(f"{self.name}, partition {partition}, offset {self._known[partition]}: {error.str()}")

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """An answer of a broker, which can be away for a while."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return ask()
            except self._kafka.KafkaException as error:
                if self._stopped.is_set():
                    raise RuntimeError("the client was stopped") from None
                if time.monotonic() > deadline_s or error.args[0].fatal():
                    raise JobError(f"{self.name}: {self._reason(error.args[0])}") from None
                self._stopped.wait(_STEP_S)

    def _reason(self, error: confluent_kafka.KafkaError) -> str:
        """An error in words, with what the client said last of its connections."""
        return f"no broker answered: {error.str()}" + (f" ({self._problem})" if self._problem else "")

    def _note(self, error: confluent_kafka.KafkaError) -> None:
        self._problem = error.str()
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN and self._down_s is None:
            self._down_s = time.monotonic()


def lost(name: str, partition: int, expected: int, low: int) -> InputError:
    """The error of messages that were deleted before they were read."""
    return InputError(
        f"{name}, partition {partition}: expected offset {expected}, the lowest available is {low}: messages were "
        f"deleted before they were read"
    )
