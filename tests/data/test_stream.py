"""The segments of a stream as a loader takes them: numbers, places, idle time, waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from data.source import Block, Segment
from data.stream import Arrived, Feed, Stream


class Letters:
    """`Arrivals` of one-letter segments, which a test puts there."""

    def __init__(self, there: str = "") -> None:
        self.there = there
        self.is_over = False
        self.is_closed = self.is_stopped = False

    def poll(self) -> Arrived | None:
        if not self.there:
            return None
        letter, self.there = self.there[0], self.there[1:]
        return Arrived(segment=Segment(file=letter, start=0, stop=1), place={"at": letter})

    def blocks(self, segment: Segment) -> Iterator[Block]:
        return iter((Block(file=segment.file, start=0, stop=1),))

    def end(self) -> None:
        self.is_over = True

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.is_closed = True


class LetterStream:
    name = "letters"
    poll_s = 60.0
    idle_s = 0.0

    def __init__(self, letters: Letters) -> None:
        self.letters = letters
        self.asked: list[Mapping[str, Any] | None] = []

    def arrivals(self, place: Mapping[str, Any] | None) -> Letters:
        self.asked.append(place)
        return self.letters


def feed_of(stream: LetterStream, *args: Any, **options: Any) -> Feed:
    return Feed(cast(Stream, stream), *args, **options)


def test_segments_are_numbered_and_their_places_kept_until_passed() -> None:
    letters = Letters("ab")
    stream = LetterStream(letters)
    feed = feed_of(stream, {"at": "a"}, 7)
    assert stream.asked == [{"at": "a"}]
    assert feed.place(7) == {"at": "a"}
    assert [number for number, _ in filter(None, [feed.poll(), feed.poll(), feed.poll()])] == [7, 8]
    assert not feed.is_over
    letters.there = "c"
    assert feed.poll() == (9, Segment(file="c", start=0, stop=1))
    assert feed.place(8) == {"at": "b"}
    assert feed.place(9) == {"at": "c"}
    assert feed.place(8) is None
    feed.release()
    assert letters.is_closed


def test_a_stream_without_news_for_its_idle_time_is_over() -> None:
    letters, now = Letters(), [100.0]
    stream = LetterStream(letters)
    stream.idle_s = 10.0
    feed = feed_of(stream, None, 0, clock=lambda: now[0])
    now[0] = 109.0
    assert feed.poll() is None
    assert not feed.is_over
    letters.there = "a"
    assert feed.poll() is not None
    for seconds in (118.0, 127.0):
        now[0] = seconds
        assert feed.poll() is None
        assert not feed.is_over
    now[0] = 128.0
    assert feed.poll() is None
    assert feed.is_over


def test_time_in_which_nobody_polls_is_no_idle_time() -> None:
    letters, now = Letters("a"), [0.0]
    stream = LetterStream(letters)
    stream.idle_s = 10.0
    feed = feed_of(stream, None, 0, clock=lambda: now[0])
    assert feed.poll() is not None
    now[0] = 100.0  # the queue was full
    assert feed.poll() is None
    assert not feed.is_over
    letters.there = "b"
    assert feed.poll() is not None


def test_a_closed_feed_ends_the_wait() -> None:
    letters = Letters()
    feed = feed_of(LetterStream(letters), None, 0)
    feed.close()
    assert letters.is_stopped
    with pytest.raises(RuntimeError, match="closed"):
        feed.wait()
