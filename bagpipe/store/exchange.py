"""One exchange with all servers at once: requests out while replies come in, under one deadline.

    Talk (per server):  frames of requests ──sendmsg──> socket ──recv_into──> buffer ──accept──> rows
    exchange:           every talk is pushed as far as it goes without waiting; only then one poll() for all of them

Rules. Replies promised but not yet read are bounded, so neither side piles up memory and none waits for the other; a
server next door is asked in small steps, so that it answers one while we read another.
A link whose exchange did not end cleanly (an error reply, a byte too many, a deadline, Ctrl-C) is closed for good: what
is still on its way would be taken for the next answer.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError

__all__ = ["Bytes", "Frame", "Link", "Pace", "Request", "Talk", "exchange"]

Bytes = NDArray[np.uint8]
#: Decodes the reply at ``buffer[start:end]``: offset after it, None while it is incomplete, StoreError if it is wrong.
Accept = Callable[[Bytes, int, int], int | None]

#: Promised replies below which nobody is woken to read them while there is more to send (they wait in the kernel).
_WORTH_RECEIVING_BYTES = 64 << 10
#: Free space kept at the end of a receive buffer: a server's usual write (64 KiB) four times over.
_RECEIVE_BYTES = 256 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


#: Requests sent in one call, at most: two pieces each, and sendmsg takes 1,024 pieces (IOV_MAX).
_MAX_REQUESTS_PER_SEND = 500


class Request(NamedTuple):
    """One command, and the reply it calls for.

    Attributes:
        head: what comes before the body.
        body: the rest of the command's bytes.
        max_reply_bytes: greatest length of the reply.
        accept: decodes the reply.
    """

    head: memoryview
    body: memoryview
    max_reply_bytes: int
    accept: Accept


#: Requests encoded at a time. Their memory may be reused once all of them are sent.
Frame = Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far to run ahead of a server's answers.

    Attributes:
        promised_bytes: ask no more while replies of so many bytes are due.
        step_bytes: ask for about so many bytes of replies per send.
    """

    promised_bytes: int
    step_bytes: int


#: On the same machine. A server reads 16 KiB of requests before it answers any, and writes 64 KiB of answers before it
#: reads again; many requests at once make it compute first and write last, and us wait first and read last. Small steps
#: were 1.2 times as fast in benchmarks/store as everything at once, and keep the server's buffers in its cache.
_LOCAL_PACE = Pace(promised_bytes=384 << 10, step_bytes=32 << 10)
#: Over a network: 2 MiB fill 10 Gbit/s at a round trip of 1.6 ms.
_REMOTE_PACE = Pace(promised_bytes=2 << 20, step_bytes=256 << 10)


class Link:
    """One connected socket to one server, with its receive buffer and its totals.

    Attributes:
        place: the server's address without its password, for messages.
        pace: how far to run ahead of its answers.
        bytes_sent: since the link was made.
        bytes_received: since the link was made.
    """

    def __init__(self, sock: socket.socket, place: str, close: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.place = place
        self.pace = _LOCAL_PACE if sock.family == socket.AF_UNIX else _REMOTE_PACE
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock
        self._close = close
        self._broken: str | None = None
        self._memory = memoryview(bytearray(2 * _RECEIVE_BYTES))
        self.buffer: Bytes = np.frombuffer(self._memory, np.uint8)

    def check(self) -> None:
        """Refuse to use a link that was closed, or on which the server spoke unasked.

        Raises:
            StoreError: says why the link was closed.
        """
        if self._broken is not None:
            raise StoreError(f"{self.place}: the connection was closed: {self._broken}")
        try:
            unasked = self._sock.recv(1)
        except _WOULD_BLOCK:
            return
        raise StoreError(f"{self.place}: " + ("bytes came unasked" if unasked else "the server closed the connection"))

    def close(self, why: str) -> None:
        """Close the socket; every later use names the first reason. Idempotent."""
        if self._broken is None:
            self._broken = why
            self._close()

    def fileno(self) -> int:
        """The socket's file descriptor, for poll()."""
        return self._sock.fileno()

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Send what fits without waiting; bytes taken, 0 if none.

        Raises:
            OSError: the connection is gone.
        """
        try:
            if isinstance(self._sock, ssl.SSLSocket):  # has no sendmsg; its record layer copies anyway
                sent = self._sock.send(pieces[0])
            else:
                sent = self._sock.sendmsg(pieces)
        except _WOULD_BLOCK:
            return 0
        self.bytes_sent += sent
        return sent

    def receive(self, start: int, end: int, room: int) -> tuple[int, int, bool]:
        """Receive what is there without waiting, behind the unread bytes ``[start, end)`` of the buffer.

        Args:
            start: first unread byte.
            end: first free byte.
            room: bytes the unread and the new data together must be able to reach.

        Returns:
            (start, end, whether anything came); the unread bytes may have moved.

        Raises:
            OSError: the connection is gone.
        """
        if start == end:
            start = end = 0
        if len(self._memory) - end < _RECEIVE_BYTES:
            start, end = self._make_room(start, end, room)
        try:
            received = self._sock.recv_into(self._memory[end:])
        except _WOULD_BLOCK:
            return start, end, False
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self.bytes_received += received
        return start, end + received, True

    def _make_room(self, start: int, end: int, room: int) -> tuple[int, int]:
        memory = self._memory
        if len(memory) < room + _RECEIVE_BYTES:
            memory = memoryview(bytearray(2 * room + _RECEIVE_BYTES))
        unread = bytes(self._memory[start:end])
        memory[: len(unread)] = unread
        if memory is not self._memory:
            self._memory, self.buffer = memory, np.frombuffer(memory, np.uint8)
        return 0, len(unread)


class Talk:
    """One link's part in one exchange: frames to send, replies to expect, in order."""

    def __init__(self, link: Link, frames: Iterator[Frame]) -> None:
        self.link = link
        self._frames = frames
        self._unsent: deque[Request] = deque()
        self._pieces: list[memoryview] = []
        self._expected: deque[Request] = deque()
        self._promised_bytes = 0
        self._more_frames = True
        self._start = self._end = 0  # unread bytes in the link's buffer
        self._undecoded = False  # something came in since a reply was found to be incomplete

    @property
    def done(self) -> bool:
        """Everything is sent and every reply is read."""
        return not (self._more_frames or self._unsent or self._pieces or self._expected)

    @property
    def wants_to_send(self) -> bool:
        """There is something to send and the bound on promised replies allows it."""
        if self._pieces:
            return True
        return bool(self._unsent or self._more_frames) and self._promised_bytes < self.link.pace.promised_bytes

    @property
    def wants_to_receive(self) -> bool:
        """Replies are due and it is time to look: short ones can wait until everything is sent."""
        return self._promised_bytes >= _WORTH_RECEIVING_BYTES or not self.wants_to_send

    def advance(self) -> bool:
        """Send and receive once each, without waiting. True if anything moved.

        Raises:
            StoreError: a wrong, malformed or surplus reply.
            OSError: the connection is gone.
        """
        moved = self._send() if self.wants_to_send else False
        if self._expected and self.wants_to_receive:
            moved |= self._receive()
        return moved

    def finish(self) -> None:
        """Check that the server said no more than it was asked.

        Raises:
            StoreError: bytes follow the last reply.
        """
        if self._end > self._start:
            raise StoreError(f"{self.link.place}: {self._end - self._start} bytes follow the last reply expected")

    def _send(self) -> bool:
        if not self._pieces:
            if not self._unsent:
                frame = next(self._frames, None)
                if frame is None:
                    self._more_frames = False
                    return True
                self._unsent.extend(frame)
            self._take_step()
        sent = left = self.link.send(self._pieces)
        whole = 0
        for piece in self._pieces:
            if piece.nbytes > left:
                break
            left -= piece.nbytes
            whole += 1
        self._pieces = self._pieces[whole:]
        if left:
            self._pieces[0] = self._pieces[0][left:]
        return sent > 0

    def _take_step(self) -> None:
        """Turn the next requests, about `step_bytes` of replies, into pieces to send."""
        promised_bytes = 0
        for _ in range(min(len(self._unsent), _MAX_REQUESTS_PER_SEND)):
            request = self._unsent.popleft()
            self._pieces.append(request.head)
            self._pieces.append(request.body)
            self._expected.append(request)
            promised_bytes += request.max_reply_bytes
            if promised_bytes >= self.link.pace.step_bytes:
                break
        self._promised_bytes += promised_bytes

    def _receive(self) -> bool:
        room, came, gone = self._expected[0].max_reply_bytes, False, None
        try:
            self._start, self._end, came = self.link.receive(self._start, self._end, room)
        except ConnectionError as error:  # what was said before still counts
            gone = error
        moved = came
        self._undecoded |= came
        while self._expected and self._undecoded:
            # A reply may be shorter than its greatest length. While more is coming in, it is cheaper not to look.
            if came and self._end - self._start < self._expected[0].max_reply_bytes:
                return True
            self._undecoded = self._accept_one()
            moved |= self._undecoded
        if gone is not None and self._expected:
            raise gone
        return moved

    def _accept_one(self) -> bool:
        """Decode the next reply. True if it was all there."""
        try:
            after = self._expected[0].accept(self.link.buffer, self._start, self._end)
        except StoreError as error:
            raise StoreError(f"{self.link.place}: {error}") from None
        if after is None:
            return False
        self._start = after
        self._promised_bytes -= self._expected.popleft().max_reply_bytes
        return True


def exchange(talks: Sequence[Talk], timeout_s: float) -> None:
    """Run all talks to their end.

    Raises:
        StoreError: a server failed, answered something else, or not within the deadline; all links are closed then.
    """
    place = talks[0].link.place if talks else ""
    deadline_s = time.monotonic() + timeout_s
    try:
        for talk in talks:
            talk.link.check()
        pending = list(talks)
        while pending:
            moved = False
            for talk in pending:
                place = talk.link.place
                moved |= talk.advance()
            pending = [talk for talk in pending if not talk.done]
            if pending and not moved:
                _wait(pending, deadline_s, timeout_s)
            elif pending and time.monotonic() > deadline_s:
                raise StoreError(_late(pending, timeout_s))
        for talk in talks:
            place = talk.link.place
            talk.finish()
    except OSError as error:
        _close_all(talks, f"{place}: {error}")
        raise StoreError(f"{place}: {error}") from error
    except BaseException as error:
        _close_all(talks, str(error) or type(error).__name__)
        raise


def _close_all(talks: Sequence[Talk], why: str) -> None:
    for talk in talks:
        talk.link.close(why)


def _wait(talks: Sequence[Talk], deadline_s: float, timeout_s: float) -> None:
    """Wait until a socket can go on.

    Raises:
        StoreError: the deadline passed.
    """
    poller = select.poll()
    for talk in talks:
        events = (select.POLLIN if talk.wants_to_receive else 0) | (select.POLLOUT if talk.wants_to_send else 0)
        poller.register(talk.link, events)
    if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        raise StoreError(_late(talks, timeout_s))


def _late(talks: Sequence[Talk], timeout_s: float) -> str:
    places = ", ".join(talk.link.place for talk in talks)
    return f"{places}: no complete answer within store.timeout_s = {timeout_s:g} s"
