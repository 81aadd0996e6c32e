"""A broker of the Kafka protocol in this process: librdkafka's own, which speaks the real protocol over TCP.

Its topics have four partitions. It keeps 5 MB of each: older messages are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Producer

__all__ = ["PARTITIONS", "Broker", "broker"]

PARTITIONS = 4

_SILENT = logging.Logger("broker")
_SILENT.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker: its address, and a client that sends messages to it."""

    address: str
    producer: Producer

    def url(self, topic: str = "clicks") -> str:
        return f"kafka://{self.address}/{topic}"

    def send(self, partition: int, messages: Iterable[bytes | None], topic: str = "clicks") -> None:
        """Send messages to a partition; return when the broker has them."""
        for message in messages:
            self.producer.produce(topic, message, partition=partition)
        assert self.producer.flush(60) == 0

    def send_round(self, messages: Iterable[bytes], run: int, first: int = 0, topic: str = "clicks") -> None:
        """Send messages in runs to one partition after the other; they are numbered from `first` on."""
        for number, message in enumerate(messages, start=first):
            self.producer.produce(topic, message, partition=number // run % PARTITIONS)
        assert self.producer.flush(60) == 0


@contextmanager
def broker() -> Iterator[Broker]:
    """A broker with no messages."""
    producer = Producer({"test.mock.num.brokers": 1, "linger.ms": 0}, logger=_SILENT)
    [found] = producer.list_topics(timeout=250).brokers.values()
    try:
        yield Broker(address=f"{found.host}:{found.port}", producer=producer)
    finally:
        producer.flush(60)
