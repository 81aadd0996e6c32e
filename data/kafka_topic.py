"""`KafkaTopic`: the messages of a topic of the Kafka protocol as a stream. A message is a line of a text format.

    kafka://host:9092/clicks ──data.topic_order: partitions in turns──> offsets [a, b) of a partition
                             ──TopicArrivals (confluent-kafka)──> their messages ──reader of lines──> Columns

The position is offsets; no consumer group is asked or told anything. Messages are read by the process that loads, and
parsed in workers. The client is an optional package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bagpipe.config.ranges import seconds_of
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.columns import Columns
from data.kafka_client import Client, client_settings
from data.source import Block, Segment, Source
from data.stream import ConfiguredStream
from data.topic_arrivals import TopicArrivals

__all__ = ["KafkaTopic", "parse_url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaTopic(ConfiguredStream):
    """A topic.

    Attributes:
        name: ``kafka://HOST:PORT/TOPIC``.
        config: of the data.
        parser: parses the messages.
        settings: of the client, by librdkafka's names. They can hold passwords.
        num_partitions: of the topic.
    """

    name: str
    config: DataConfig
    parser: Source
    settings: tuple[tuple[str, str], ...] = field(repr=False)
    num_partitions: int
    longest_poll_s: ClassVar[float] = 0.5

    @classmethod
    def at(cls, config: DataConfig, lines: Source) -> KafkaTopic:
        """The topic of a configuration.

        Args:
            config: the `data` section; its path is the topic.
            lines: reads blocks that hold their text.

        Raises:
            InputError: no such topic, no broker, or no client.
        """
        brokers, topic = parse_url(config.path)
        settings = client_settings(brokers, config.kafka_config)
        with Client(config.path, topic, settings) as client:
            num_partitions = client.num_partitions()
        return cls(name=config.path, config=config, parser=lines, settings=settings, num_partitions=num_partitions)

    @property
    def layout(self) -> str:
        return f"kafka/{self.num_partitions}/{self.config.kafka_run}/{self.parser.layout}"

    def arrivals(self, place: Mapping[str, Any] | None) -> TopicArrivals:
        until = seconds_of(self.config.until) if self.config.until else None
        client = Client(self.name, parse_url(self.name)[1], self.settings)
        return TopicArrivals(client, place, run=self.config.kafka_run, until_s=until)

    def segments(self) -> tuple[Segment, ...]:
        raise InputError(f"{self.name}: a topic has no parts that are known beforehand: it can only be trained on")

    def blocks(self, segment: Segment) -> Iterator[Block]:
        del segment
        raise InputError(f"{self.name}: only `arrivals` has the messages of a topic")

    def read(self, block: Block) -> Columns:
        try:
            return self.parser.read(replace(block, file="", line=1))
        except InputError as error:  # `:LINE: reason`, the line counted in the block
            found = re.match(r":(\d+): ", str(error))
            if found is None:
                raise InputError(f"{block.file}: {error}") from None
            raise InputError(f"{self.locate(block, int(found[1]) - 1)}: {str(error)[found.end() :]}") from None

    def locate(self, block: Block, row: int) -> str:
        if block.num_rows == block.stop - block.start:
            return f"{block.file}, offset {block.start + row}"
        return f"{block.file}, message {row + 1} of offsets {block.start} to {block.stop - 1}"

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        raise InputError(f"{self.name}: the messages of a topic are not counted")


def parse_url(url: str) -> tuple[str, str]:
    """Brokers and topic of ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``.

    Raises:
        InputError: it is none.
    """
    found = re.fullmatch(r"kafka://([^/@\s]+)/([A-Za-z0-9._-]{1,249})", url)
    if found is None or not all(re.fullmatch(r".+:\d{1,5}", broker) for broker in found[1].split(",")):
        shown = f"kafka://{url.rpartition('@')[2]}" if "@" in url else url  # a password can stand before it
        raise InputError(f"data.path must be kafka://HOST:PORT[,HOST:PORT]/TOPIC, got {shown}")
    return found[1], found[2]
