"""Request pipelines to several servers at once: requests go out while replies come in, under one deadline.

    RequestPipeline (per server):  frames of requests ──sendmsg──> socket ──recv_into──> buffer ──accept──> rows
    exchange:                      advances every pipeline without blocking, then one poll() for all of them

The bytes of outstanding replies are bounded, so that neither side buffers without limit and no deadlock is possible. A
local server gets small steps, so that it computes one reply while the client reads another.
A link is closed for good if its exchange fails (error reply, surplus byte, deadline, Ctrl-C), because late replies
would be taken for answers to later requests. Callers decide whether to reconnect.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.redis.link import Bytes, Link, LinkLost
from bagpipe.store.redis.log_guard import ShortLog
from bagpipe.store.redis.passing import is_passing
from bagpipe.store.redis.resp_rows import ErrorReply

__all__ = ["Accept", "Accepted", "Frame", "Request", "RequestPipeline", "exchange"]


class Accepted(NamedTuple):
    """Some bytes of the replies expected next.

    Attributes:
        end: offset after them.
        num_requests: requests whose replies end there or before.
        is_all: nothing behind `end` can be decoded before more bytes arrive.
    """

    end: int
    num_requests: int
    is_all: bool


#: Decodes the reply at ``buffer[start:end]``. Returns the offset after it, None while incomplete; raises StoreError.
#: One that decodes the replies of several requests in a row, in parts of any length, returns `Accepted`.
Accept = Callable[[Bytes, int, int], int | Accepted | None]

#: Outstanding reply bytes below which sending goes first; the replies wait in the kernel.
_WORTH_RECEIVING_BYTES = 64 << 10
#: Reply bytes that are decoded together while more arrive: one call of numpy costs as much as decoding 20 rows.
_WORTH_DECODING_BYTES = 256 << 10
#: Approximate number of pieces per sendmsg call, whose limit is 1,024 (IOV_MAX).
_ENOUGH_PIECES = 750


#: Errors that keep their class when the server's address is added.
_NAMED = (FencedError, RolledBackError)


class Request(NamedTuple):
    """One command or transaction, and the expected reply.

    Attributes:
        pieces: encoded bytes, in at most 256 pieces.
        max_reply_bytes: upper bound of the reply's length.
        accept: decodes the reply.
    """

    pieces: Sequence[memoryview]
    max_reply_bytes: int
    accept: Accept


#: Requests encoded together. Their memory can be reused once all of them are sent.
Frame = Sequence[Request]


class RequestPipeline:
    """Requests to send over one link and replies to expect, in order.

    Args:
        link: to the server.
        frames: of requests.
        refused: passed over are replies that refuse a request for the time being (`bagpipe.store.redis.passing`); their
            lines are appended. None: they are errors.
    """

    def __init__(self, link: Link, frames: Iterator[Frame], refused: list[str] | None = None) -> None:
        self.link = link
        self._refused = refused
        self._frames = frames
        self._unsent: deque[Request] = deque()
        self._pieces: list[memoryview] = []
        self._expected: deque[Request] = deque()
        self._promised_bytes = 0
        self._more_frames = True
        self._start = self._end = 0  # unread bytes in the link's buffer
        self._undecoded = False  # bytes arrived since a reply was found to be incomplete

    @property
    def done(self) -> bool:
        """Every request is sent and every reply is read."""
        return not (self._more_frames or self._unsent or self._pieces or self._expected)

    @property
    def wants_to_send(self) -> bool:
        """Whether there is a request to send and the bound on outstanding replies allows it."""
        if self._pieces:
            return True
        return bool(self._unsent or self._more_frames) and self._outstanding_bytes < self.link.pace.promised_bytes

    @property
    def wants_to_receive(self) -> bool:
        """Whether to read replies now; short ones wait until everything is sent."""
        return self._outstanding_bytes >= _WORTH_RECEIVING_BYTES or not self.wants_to_send

    @property
    def _outstanding_bytes(self) -> int:
        """Bound on the bytes of replies that have not arrived."""
        return self._promised_bytes - (self._end - self._start)

    def advance(self) -> bool:
        """Send and receive once each, without blocking. Returns whether any byte moved.

        Raises:
            StoreError: a wrong, malformed or surplus reply.
            OSError: the connection is lost.
        """
        moved = self._send() if self.wants_to_send else False
        if self._expected and self.wants_to_receive:
            moved |= self._receive()
        return moved

    def finish(self) -> None:
        """Check for surplus bytes.

        Raises:
            StoreError: bytes follow the last reply.
        """
        if self._end > self._start:
            raise StoreError(f"{self.link.endpoint}: {self._end - self._start} bytes follow the last reply expected")

    def _pass_over(self, error: StoreError) -> Accepted | None:
        """Note a refusal that passes. None for any other error."""
        if self._refused is None:
            return None
        if isinstance(error, ErrorReply) and is_passing(error.line):
            self._refused.append(f"{self.link.endpoint}: {error}")
            return Accepted(error.end, error.num_requests, is_all=False)
        if isinstance(error, ShortLog) and self._refused:  # the gap can be a group that was refused before
            self._refused.append(f"{self.link.endpoint}: {error}")
            return Accepted(error.end, 1, is_all=False)
        return None

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
        """Take the next requests, about `step_bytes` of replies, as pieces to send."""
        promised_bytes = 0
        while self._unsent and len(self._pieces) < _ENOUGH_PIECES:
            request = self._unsent.popleft()
            self._pieces += request.pieces
            self._expected.append(request)
            promised_bytes += request.max_reply_bytes
            if promised_bytes >= self.link.pace.step_bytes:
                break
        self._promised_bytes += promised_bytes

    def _receive(self) -> bool:
        came, gone = False, None
        enough = min(self._promised_bytes, max(self._expected[0].max_reply_bytes, _WORTH_DECODING_BYTES))
        try:
            self._start, self._end, came = self.link.receive(self._start, self._end, enough)
        except ConnectionError as error:  # replies received before it still count
            gone = error
        moved = came
        self._undecoded |= came
        while self._expected and self._undecoded:
            # A reply can be shorter than its bound. While more bytes arrive, decoding early is wasteful.
            if came and self._end - self._start < min(enough, self._promised_bytes):
                return True
            self._undecoded = self._accept_one()
            moved |= self._undecoded
        if gone is not None and self._expected:
            raise gone
        return moved

    def _accept_one(self) -> bool:
        """Decode the next reply, or a part of it. Returns whether more of what has arrived can be decoded."""
        try:
            after = self._expected[0].accept(self.link.buffer, self._start, self._end)
        except StoreError as error:
            passed = self._pass_over(error)
            if passed is None:
                kind = next((named for named in _NAMED if isinstance(error, named)), StoreError)
                raise kind(f"{self.link.endpoint}: {error}") from None
            after = passed
        if after is None:
            return False
        if not isinstance(after, Accepted):
            self._start = after
            self._promised_bytes -= self._expected.popleft().max_reply_bytes
            return True
        self._start, num_requests, is_all = after
        if num_requests > len(self._expected):
            raise StoreError(f"{self.link.endpoint}: answered {num_requests - len(self._expected)} requests in advance")
        for _ in range(num_requests):
            self._promised_bytes -= self._expected.popleft().max_reply_bytes
        return not is_all


def exchange(
    pipelines: Sequence[RequestPipeline],
    timeout_s: float,
    *,
    deadline_s: float | None = None,
    patience_s: float = math.inf,
) -> None:
    """Run all pipelines to completion.

    Args:
        pipelines: one per link.
        timeout_s: duration limit; only used in messages if `deadline_s` is given.
        deadline_s: deadline by `time.monotonic`; None: `timeout_s` from now.
        patience_s: seconds without a byte from or to any server, after which silent servers count as lost.

    Raises:
        LinkLost: a connection is lost or silent. All links are closed.
        StoreError: a server sent an unexpected reply or missed the deadline. All links are closed.
    """
    endpoint = pipelines[0].link.endpoint if pipelines else ""
    if deadline_s is None:
        deadline_s = time.monotonic() + timeout_s
    try:
        for pipeline in pipelines:
            pipeline.link.check()
        pending = list(pipelines)
        while pending:
            moved = False
            for pipeline in pending:
                endpoint = pipeline.link.endpoint
                moved |= pipeline.advance()
            pending = [pipeline for pipeline in pending if not pipeline.done]
            if pending and not moved:
                _wait(pending, deadline_s, timeout_s, patience_s)
            elif pending and time.monotonic() > deadline_s:
                raise StoreError(_late(pending, timeout_s))
        for pipeline in pipelines:
            endpoint = pipeline.link.endpoint
            pipeline.finish()
    except OSError as error:
        _close_all(pipelines, f"{endpoint}: {error}")
        raise LinkLost(f"{endpoint}: {error}", endpoint) from error
    except BaseException as error:
        _close_all(pipelines, str(error) or type(error).__name__)
        raise


def _close_all(pipelines: Sequence[RequestPipeline], why: str) -> None:
    for pipeline in pipelines:
        pipeline.link.close(why)


def _wait(pipelines: Sequence[RequestPipeline], deadline_s: float, timeout_s: float, patience_s: float) -> None:
    """Wait until a socket is ready.

    Raises:
        StoreError: the deadline passed.
        LinkLost: no socket was ready for `patience_s`.
    """
    poller = select.poll()
    for pipeline in pipelines:
        events = (select.POLLIN if pipeline.wants_to_receive else 0) | (select.POLLOUT if pipeline.wants_to_send else 0)
        poller.register(pipeline.link, events)
    left_s = max(0.0, deadline_s - time.monotonic())
    if not poller.poll(min(left_s, patience_s) * 1e3):
        if left_s <= patience_s:
            raise StoreError(_late(pipelines, timeout_s))
        endpoints = [pipeline.link.endpoint for pipeline in pipelines]
        raise LinkLost(f"{', '.join(endpoints)}: silent for {patience_s:g} s", *endpoints)


def _late(pipelines: Sequence[RequestPipeline], timeout_s: float) -> str:
    endpoints = ", ".join(pipeline.link.endpoint for pipeline in pipelines)
    return f"{endpoints}: no complete answer within store.timeout_s = {timeout_s:g} s"
