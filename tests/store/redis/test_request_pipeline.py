"""Exchanges with misbehaving servers: one thread and one socket pair per connection, no clock."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store.redis.link import Bytes, Link, LinkLost
from bagpipe.store.redis.log_guard import ShortLog
from bagpipe.store.redis.request_pipeline import Accepted, Frame, Request, RequestPipeline, exchange
from bagpipe.store.redis.resp_rows import ErrorReply

pytestmark = pytest.mark.usefixtures("no_leaks")
TIMEOUT_S = 20.0


Accept = Callable[[Bytes, int, int], int | None]


def accept_line(log: list[bytes]) -> Accept:
    """Accepts and logs one line; refuses a line that starts with '-'."""

    def accept(buffer: Bytes, start: int, end: int) -> int | None:
        line, separator, _ = buffer[start:end].tobytes().partition(b"\n")
        if not separator:
            return None
        if line.startswith(b"-"):
            raise StoreError(f"answered {line.decode()}")
        log.append(line)
        return start + len(line) + 1

    return accept


@contextmanager
def linked(serve: Callable[[socket.socket], None]) -> Iterator[Link]:
    """A link whose other end is served by a thread."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        yield Link(ours, "server-1", ours.close)
    finally:
        ours.close()
        thread.join()
        theirs.close()


def answer(reply: bytes, *, then_close: bool = False) -> Callable[[socket.socket], None]:
    """Waits for one byte, replies, and keeps the connection open until the peer closes it."""

    def serve(sock: socket.socket) -> None:
        sock.recv(1)
        sock.sendall(reply)
        if then_close:
            sock.shutdown(socket.SHUT_RDWR)
        else:
            while sock.recv(1 << 16):
                pass

    return serve


def ask(link: Link, log: list[bytes], num_replies: int = 1) -> RequestPipeline:
    return RequestPipeline(link, iter([[request(b"?", 100, accept_line(log))] * num_replies]))


def request(question: bytes, max_reply_bytes: int, accept: Accept) -> Request:
    return Request((memoryview(question),), max_reply_bytes, accept)


def test_replies_arrive_in_order() -> None:
    log: list[bytes] = []
    with linked(answer(b"one\ntwo\n")) as link:
        exchange([ask(link, log, 2)], TIMEOUT_S)
        assert log == [b"one", b"two"]
        assert (link.bytes_sent, link.bytes_received) == (2, 8)


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (answer(b"-ERR no\n"), "server-1: answered -ERR no"),
        (answer(b"one\ntwo\n"), "server-1: 4 bytes follow the last reply expected"),
        (answer(b"on", then_close=True), "server-1: the server closed the connection"),
    ],
)
def test_a_bad_answer_closes_the_link_for_good(serve: Callable[[socket.socket], None], message: str) -> None:
    log: list[bytes] = []
    with linked(serve) as link:
        with pytest.raises(StoreError, match=message):
            exchange([ask(link, log)], TIMEOUT_S)
        with pytest.raises(StoreError, match="server-1: the connection was closed: server-1: "):
            exchange([ask(link, log)], TIMEOUT_S)
        assert link.fileno() == -1


def accept_reply(buffer: Bytes, start: int, end: int) -> int | None:
    """A reply of one byte: - and ! are errors, S a log that is too short."""
    if start == end:
        return None
    match buffer[start : start + 1].tobytes():
        case b"-":
            raise ErrorReply("LOADING later", start, start + 1)
        case b"!":
            raise ErrorReply("OOM no", start, start + 1)
        case b"S":
            raise ShortLog("a gap", start + 1)
    return start + 1


@pytest.mark.parametrize(
    ("replies", "refused"),
    [
        (b"+++", []),
        (b"+-+", ["LOADING"]),
        (b"-S+", ["LOADING", "gap"]),  # the second group of a bucket whose first one was refused
        (b"S+-", None),  # a log that was too short before any refusal
        (b"-!+", None),
    ],
)
def test_a_refusal_that_passes_takes_the_place_of_a_reply(replies: bytes, refused: list[str] | None) -> None:
    lines: list[str] = []
    with linked(answer(replies)) as link:
        pipeline = RequestPipeline(link, iter([[request(b"?", 1, accept_reply)] * 3]), lines)
        if refused is None:
            with pytest.raises(StoreError, match=r"server-1: (a gap|.*OOM no)"):
                exchange([pipeline], TIMEOUT_S)
            return
        exchange([pipeline], TIMEOUT_S)
        assert link.fileno() >= 0
    assert len(lines) == len(refused)
    for line, word in zip(lines, refused, strict=True):
        assert line.startswith("server-1: ")
        assert word in line


def test_replies_to_requests_that_were_not_sent_are_an_error() -> None:
    """One decoder of several replies can decode more than were asked for."""
    with linked(answer(b"one\ntwo\n")) as link:
        request = Request((memoryview(b"?"),), 100, lambda *_: Accepted(8, 2, is_all=True))
        pipeline = RequestPipeline(link, iter([[request]]))
        with pytest.raises(StoreError, match="server-1: answered 1 requests in advance"):
            exchange([pipeline], TIMEOUT_S)
        assert link.fileno() == -1


def test_unrequested_bytes_are_an_error() -> None:
    def serve(sock: socket.socket) -> None:
        sock.sendall(b"surplus\n")
        with suppress(ConnectionResetError):  # closed before everything was read
            sock.recv(1)

    log: list[bytes] = []
    with linked(serve) as link:
        select.select([link], [], [])
        with pytest.raises(StoreError, match="received bytes without a request"):
            exchange([ask(link, log)], TIMEOUT_S)
        assert log == []


def test_a_server_that_went_away_between_two_exchanges() -> None:
    log: list[bytes] = []
    with linked(answer(b"one\n", then_close=True)) as link:
        exchange([ask(link, log)], TIMEOUT_S)
        select.select([link], [], [])
        with pytest.raises(StoreError, match="the server closed the connection"):
            exchange([ask(link, log)], TIMEOUT_S)


def test_silence_ends_at_the_deadline_and_every_link_is_closed() -> None:
    log: list[bytes] = []
    with linked(answer(b"one\n")) as good, linked(answer(b"")) as silent:
        with pytest.raises(StoreError, match=r"no complete answer within store\.timeout_s = 0\.05 s"):
            exchange([ask(good, log), ask(silent, log)], 0.05)
        for link in (good, silent):
            with pytest.raises(StoreError, match="the connection was closed"):
                link.check()


def test_silence_may_count_as_a_lost_connection_before_the_deadline() -> None:
    log: list[bytes] = []
    with linked(answer(b"one\n")) as good, linked(answer(b"")) as silent:
        silent.endpoint = "server-2"
        with pytest.raises(LinkLost, match=r"server-2: silent for 0\.05 s") as caught:
            exchange([ask(good, log), ask(silent, log)], TIMEOUT_S, patience_s=0.05)
        assert caught.value.endpoints == ("server-2",)
        assert log == [b"one"]


def test_a_deadline_can_be_partly_used() -> None:
    with linked(answer(b"")) as silent:
        with pytest.raises(StoreError, match=r"within store\.timeout_s = 20 s"):
            exchange([ask(silent, [])], TIMEOUT_S, deadline_s=time.monotonic() + 0.05)


def test_slow_bytes_do_not_extend_the_deadline() -> None:
    def serve(sock: socket.socket) -> None:
        with suppress(OSError):
            while True:
                sock.sendall(b"." * 64)

    log: list[bytes] = []
    endless = request(b"?", 1, lambda buffer, start, end: end)
    with linked(serve) as link:
        link.check = lambda: None  # type: ignore[method-assign]  # the server talks at once
        pipeline = RequestPipeline(link, iter([[endless] * 1_000_000]))
        with pytest.raises(StoreError, match="no complete answer within"):
            exchange([pipeline], 0.05)
    assert log == []


def test_an_interrupt_closes_the_link() -> None:
    def interrupt(buffer: Bytes, start: int, end: int) -> int | None:
        raise KeyboardInterrupt

    with linked(answer(b"one\n")) as link:
        with pytest.raises(KeyboardInterrupt):
            exchange([RequestPipeline(link, iter([[request(b"?", 100, interrupt)]]))], TIMEOUT_S)
        with pytest.raises(StoreError, match="KeyboardInterrupt"):
            link.check()


def test_large_requests_and_replies_do_not_deadlock() -> None:
    """Both sides send far more than the sockets buffer: only writing, or only reading, would deadlock."""
    size, count = 300_000, 40

    def serve(sock: socket.socket) -> None:
        for _ in range(count):
            left = size
            while left:
                left -= len(sock.recv(min(left, 1 << 16)))
            sock.sendall(b"r" * size)

    received = []

    def accept(buffer: Bytes, start: int, end: int) -> int | None:
        if end - start < size:
            return None
        assert (buffer[start : start + size] == ord("r")).all()
        received.append(size)
        return start + size

    question = np.full(size, ord("q"), np.uint8)
    frames = ([Request((question[:1].data, question[1:].data), size, accept)] for _ in range(count))
    with linked(serve) as link:
        exchange([RequestPipeline(link, frames)], TIMEOUT_S)
        assert len(received) == count
        assert link.bytes_sent == link.bytes_received == size * count


def test_promised_replies_are_bounded() -> None:
    """Requests to a server that does not reply are bounded."""
    asked = 0

    def frames() -> Iterator[Frame]:
        nonlocal asked
        while True:
            asked += 1
            yield [request(b"?", 100 << 10, lambda buffer, start, end: None)]

    with linked(answer(b"")) as link:
        with pytest.raises(StoreError, match="no complete answer"):
            exchange([RequestPipeline(link, frames())], 0.05)
        assert asked == 4, "384 KiB on a unix socket"


def test_no_pipelines_at_all() -> None:
    exchange([], TIMEOUT_S)
