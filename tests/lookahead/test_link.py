"""Frames between two ends, here two threads: in order, whole, whatever their size and that of the ring."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.lookahead.link import Link, LinkClosed
from bagpipe.util.shared_file import open_shared_file


@contextmanager
def links(ring_bytes: int = 64, *, is_alive: bool = True) -> Iterator[tuple[Link, Link]]:
    """Both ends of a connection."""
    files = [open_shared_file(ring_bytes) for _ in range(2)]
    (first_read, second_write), (second_read, first_write) = os.pipe(), os.pipe()
    first = Link(read_fd=first_read, write_fd=first_write, in_fd=files[0], out_fd=files[1], is_alive=lambda: is_alive)
    second = Link(
        read_fd=second_read, write_fd=second_write, in_fd=files[1], out_fd=files[0], is_alive=lambda: is_alive
    )
    for fd in files:
        os.close(fd)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def frames_of(sizes: list[int]) -> list[bytes]:
    return [np.random.default_rng(size).bytes(size) for size in sizes]


SIZES = st.lists(st.integers(0, 300), max_size=8)


@given(SIZES, SIZES, st.integers(1, 100))
def test_both_ends_send_at_once(there: list[int], back: list[int], ring_bytes: int) -> None:
    """Neither receives before it has sent all: a ring is smaller than what is under way."""
    received: dict[str, list[tuple[int, int, bytes]]] = {}

    def talk(name: str, link: Link, given: list[int], count: int) -> None:
        for number, data in enumerate(frames_of(given)):
            link.send(number, 7, [data[:5], data[5:]])
        received[name] = [
            (frame.kind, frame.run, bytes(frame.data)) for frame in (link.receive() for _ in range(count))
        ]

    with links(ring_bytes) as (first, second):
        other = threading.Thread(target=talk, args=("second", second, back, len(there)))
        other.start()
        talk("first", first, there, len(back))
        other.join()
    assert received["second"] == [(number, 7, data) for number, data in enumerate(frames_of(there))]
    assert received["first"] == [(number, 7, data) for number, data in enumerate(frames_of(back))]


def test_what_was_sent_before_the_end_arrives() -> None:
    with links() as (first, second):
        first.send(1, 0, [b"12345678"])
        first.close()
        first.close()
        assert second.receive().data == b"12345678"
        with pytest.raises(LinkClosed):
            second.receive()


def test_a_sender_finds_the_end() -> None:
    with links() as (first, second):
        second.close()
        with pytest.raises(LinkClosed):
            first.send(1, 0, [bytes(100)])


def test_a_dead_process_is_found_although_its_pipe_is_open_elsewhere() -> None:
    """As where the user's own children have inherited it."""
    with links(is_alive=False) as (first, _), pytest.raises(LinkClosed):
        first.receive()


def test_the_file_is_gone_with_its_last_user() -> None:
    fd = open_shared_file(4096)
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_size == 4096
    os.close(fd)
