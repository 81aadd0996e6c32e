"""Turns of a topic as they arrive over the real protocol, their end, and what is refused when messages are gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from bagpipe.errors import InputError
from data.kafka_client import Client, client_settings
from data.stream import Arrived
from data.topic_arrivals import TopicArrivals
from tests.data.brokers import Broker, broker


@pytest.fixture
def kafka() -> Iterator[Broker]:
    with broker() as found:
        yield found


def arrivals_of(kafka: Broker, place: dict[str, Any] | None = None, **options: Any) -> TopicArrivals:
    client = Client(kafka.url(), "clicks", client_settings(kafka.address, ""))
    return TopicArrivals(client, place, run=3, **options)


def await_turn(arrivals: TopicArrivals) -> Arrived:
    """The next turn, whose messages the broker has."""
    while (found := arrivals.poll()) is None:
        assert not arrivals.is_over
    return found


def text(arrivals: TopicArrivals, found: Arrived) -> tuple[str, bytes]:
    [block] = arrivals.blocks(found.segment)
    assert block.payload is not None
    return found.segment.file.rpartition(", ")[2], block.payload.replace(b"\n", b"")


def test_turns_arrive_and_a_closed_leg_is_read_to_its_end(kafka: Broker) -> None:
    for partition, letters in enumerate((b"abcd", b"efg", b"h", b"ijkl")):
        kafka.send(partition, [bytes([letter]) for letter in letters])
    with closing(arrivals_of(kafka)) as arrivals:
        assert text(arrivals, await_turn(arrivals)) == ("partition 0", b"abc")
        assert text(arrivals, await_turn(arrivals)) == ("partition 1", b"efg")
        assert arrivals.poll() is None
        assert not arrivals.is_over
        arrivals.end()
        found = [text(arrivals, turn) for turn in iter(arrivals.poll, None)]
        assert found == [("partition 2", b"h"), ("partition 3", b"ijk"), ("partition 0", b"d"), ("partition 3", b"l")]
        assert arrivals.is_over


def test_a_time_that_passes_closes_the_leg(kafka: Broker) -> None:
    kafka.send(1, [b"a"])
    now = [100.0]
    with closing(arrivals_of(kafka, until_s=100.0, now=lambda: now[0])) as arrivals:
        assert arrivals.poll() is None
        now[0] = 101.0
        assert text(arrivals, await_turn(arrivals)) == ("partition 1", b"a")
        assert arrivals.poll() is None
        assert arrivals.is_over


def test_a_wait_for_messages_can_be_stopped(kafka: Broker) -> None:
    kafka.send(0, [b"a"])
    with closing(arrivals_of(kafka)) as arrivals:
        arrivals.stop()
        with pytest.raises(RuntimeError, match="the client was stopped"):
            arrivals._client.messages(0, 7)


def test_messages_that_were_deleted_before_the_start_are_named(kafka: Broker) -> None:
    kafka.send(2, [b"a"] * 40)
    kafka.send(2, [b"x" * 900_000] * 7)  # the broker keeps 5 MB
    place = {"start": [0, 0, 3, 0], "stop": None, "turn": 0}
    message = (
        r", partition 2: expected offset 3, the lowest available is \d\d: messages were deleted before they were read$"
    )
    with pytest.raises(InputError, match=f"^{kafka.url()}{message}"):
        arrivals_of(kafka, place)


def test_messages_that_are_deleted_meanwhile_are_named(kafka: Broker) -> None:
    kafka.send(2, [b"a"] * 4)
    with closing(arrivals_of(kafka)) as arrivals:
        client = arrivals._client
        while client.has(2, 4) is False:
            pass
        client.begin((0, 0, 0, 0), 3)  # as after an outage
        kafka.send(2, [b"x" * 900_000] * 7)
        with pytest.raises(InputError, match="partition 2: expected offset 0, the lowest available is "):
            client.messages(2, 11)


def test_a_topic_made_anew_is_refused(kafka: Broker) -> None:
    kafka.send(2, [b"a"] * 40)
    place = {"start": [0, 0, 90, 0], "stop": None, "turn": 0}
    expected = "partition 2: expected at least offset 90, it ends at 40: it was read further, so it was made anew"
    with pytest.raises(InputError, match=expected):
        arrivals_of(kafka, place)
