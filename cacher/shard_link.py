"""`ShardLink`: one phase from one shard. A thread receives its parts, and begins anew where a lost stream ended.

    IndexHello, IndexStart ──> shard ──parts──> receiver thread ──decoded, at most `credits`──> take(index)
                               lost: revive the shard, a new stream from the first batch not received

A shard that is not back in time, or is lost again and again at the same batch, ends the job with its name.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address
from bagpipe.client.agreement import PROTOCOL_VERSION
from bagpipe.client.codec import CodecError
from bagpipe.client.index_codec import ShardPart, decode_index
from bagpipe.client.link import Credentials, LinkLost, Stream
from bagpipe.client.shared_ring import RingReader, SharedFile
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.util.documents import parse_json

__all__ = ["IndexCall", "Shard", "ShardEnded", "ShardLink", "ShardTotals", "Stopped", "check_welcome"]

_ERRORS: Mapping[str, type[Exception]] = {"InputError": InputError, "CapacityError": CapacityError}

#: The delay between attempts doubles from the first to the last.
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 1.0
#: Losses at the same batch before the shard counts as broken.
_MAX_LOSSES = 3


class Stopped(Exception):
    """The phase was stopped."""


class ShardEnded(JobError):
    """The data ended before a batch that was asked for."""


class Shard(Protocol):
    """A shard that can be dialled.

    Attributes:
        name: for messages and metrics.
        credentials: that it asks for.
    """

    @property
    def name(self) -> str: ...

    @property
    def credentials(self) -> Credentials: ...

    def address(self) -> Address:
        """Where it listens now."""
        ...

    def revive(self) -> None:
        """Start it again if it has ended and is ours; else nothing.

        Raises:
            InputError, JobError: it does not start.
        """
        ...


@dataclass(slots=True, kw_only=True)
class ShardTotals:
    """Totals of a shard, of all phases.

    Attributes:
        batches, num_bytes: indexes received, and their bytes.
        busy_s: seconds it spent on them.
        idle_s: seconds it waited for credits: it was ahead.
        waited_s: seconds the planner waited for it.
        rss_bytes: memory of its process, at the latest batch.
        losses: streams lost.
    """

    batches: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    waited_s: float = 0.0
    rss_bytes: int = 0
    losses: int = 0


class IndexCall(Stream):
    """An `Index` call. One thread reads `messages`; any thread can `put`.

    Args:
        address: of the shard.
        credentials: that it asks for.
    """

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._requests: queue.SimpleQueue[pb.IndexRequest | None] = queue.SimpleQueue()
        self._ring: RingReader | None = None
        self._open = ExitStack()
        self._is_local = bool(address.path)
        super().__init__(address, credentials, "Index", iter(self._requests.get, None))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def put(self, **kind: Any) -> None:
        """Send a request. Never blocks. A lost call drops it."""
        self._requests.put(pb.IndexRequest(**kind))

    def cancel(self) -> None:
        """See `Stream`."""
        self._requests.put(None)
        super().cancel()

    def hello(self, settings: str) -> Iterator[pb.IndexReply]:
        """Say who this is. The shard's messages: the first is its Welcome.

        Raises:
            InputError, JobError: the shard's error; or it is no shard.
            LinkLost: the connection failed.
        """
        self.put(hello=pb.IndexHello(protocol=PROTOCOL_VERSION, settings=settings))
        for message in self.messages():
            if message.WhichOneof("kind") == "error":
                raise _ERRORS.get(message.error.kind, JobError)(message.error.message)
            yield message

    def share(self, file: pb.SharedFile) -> None:
        """Take large parts from the shard's memory, if that is in reach from here."""
        ring = RingReader(SharedFile(pid=file.pid, fd=file.fd, num_bytes=file.num_bytes, nonce=file.nonce))
        if self._is_local:
            with suppress(OSError, ValueError):  # a container with other processes, a system without /proc
                self._ring = self._open.enter_context(ring)
                self.put(share=pb.Share())

    def frame(self, part: pb.IndexPart) -> bytes:
        """The bytes of a part, here or in shared memory.

        Raises:
            CodecError: they are not there.
        """
        if not part.HasField("shared"):
            return part.payload
        if self._ring is None:
            raise CodecError("a part in shared memory, which is not open")
        try:
            return self._ring.take(part.shared.start, part.shared.num_bytes)
        except (OSError, ValueError) as error:
            raise CodecError(f"a part in shared memory that cannot be read: {error}") from None


def check_welcome(name: str, welcome: pb.IndexWelcome, identity: BatchIdentity) -> None:
    """Raise InputError, naming the shard, unless it has our code and reads our data."""
    try:
        theirs = BatchIdentity.from_json(parse_json(welcome.identity))
    except (ValueError, InputError) as error:
        raise InputError(f"{name} sent an identity of its data that cannot be read: {error}") from None
    if theirs.code != identity.code:
        raise InputError(f"{name} runs other code than the cacher: expected {identity.code}, got {theirs.code}")
    change = identity.first_change(theirs)
    if change is not None:
        raise InputError(f"{name} reads other data than the cacher: {change}")


class ShardLink:
    """Thread-safe between its own thread and one that calls the methods.

    Args:
        shard: where the parts come from.
        settings: JSON that the shard compares with its own.
        identity: of the data.
        start: what to ask for, from `start.next_batch` on.
        state_before: JSON of a reader's state at or before a batch, to begin with it; empty: there is none.
        timeout_s: how long the shard may be out of reach.
        totals: of the shard.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        settings: str,
        identity: BatchIdentity,
        start: pb.IndexStart,
        state_before: Callable[[int], str],
        timeout_s: float,
        totals: ShardTotals,
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._identity = identity
        self._start = start
        self._state_before = state_before
        self._timeout_s = timeout_s
        self._totals = totals
        self._changed = threading.Condition()
        self._parts: deque[ShardPart] = deque()
        self._next = int(start.next_batch)  # to be received next
        self._end: int | None = None  # number of batches in the data
        self._error: Exception | None = None
        self._call: IndexCall | None = None
        self._started: IndexCall | None = None  # the call, once it has its IndexStart
        self._was_there = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._receive, name=f"cacher-{shard.name}", daemon=True)

    def begin(self) -> None:
        """Start the receiver thread."""
        self._thread.start()

    def take(self, index: int) -> ShardPart:
        """The part of a batch. Batches are taken in order, and waited for.

        Raises:
            InputError: bad data at this batch.
            ShardEnded: there is no such batch.
            JobError: the shard is lost.
            Stopped: `stop` was called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._parts or self._error is not None or self._is_stopped or self._end is not None
            )
            if self._is_stopped:
                raise Stopped
            if not self._parts:
                if self._error is not None:
                    raise self._error
                raise ShardEnded(f"{self._shard.name} ended at batch {self._end}, before batch {index} of the data")
            part, call = self._parts.popleft(), self._started
        if part.indexed.batch_index != index:
            raise JobError(f"{self._shard.name} sent batch {part.indexed.batch_index}, expected {index}")
        if call is not None:
            call.put(ack=pb.IndexAck(watermark=index + 1))
        return part

    def count_wait(self, waited_s: float) -> None:
        """The planner waited so long for the part taken last; not at all if that is negative."""
        self._totals.waited_s += max(0.0, waited_s)

    def stop(self) -> None:
        """End the stream. Does not wait for the thread. From any thread."""
        with self._changed:
            self._is_stopped = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after `stop`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # The receiver thread.

    def _receive(self) -> None:
        try:
            self._keep_receiving()
        except Exception as error:  # the planner must get any error instead of waiting
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _keep_receiving(self) -> None:
        delay_s, losses, deadline_s = _FIRST_DELAY_S, 0, time.monotonic() + self._timeout_s
        while not self._is_over():
            before, self._was_there = self._next, False
            try:
                self._revive()
                self._receive_stream()
                reason = "it ended the stream"
            except LinkLost as error:
                reason = str(error)
            if self._is_over():
                return
            self._totals.losses += 1
            if self._next > before:
                delay_s, losses = _FIRST_DELAY_S, 0
            if self._was_there:
                losses, deadline_s = losses + 1, time.monotonic() + self._timeout_s
            if losses >= _MAX_LOSSES or time.monotonic() + delay_s > deadline_s:
                raise JobError(f"{self._shard.name} was lost at batch {self._next} and is not back: {reason}")
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped, delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def _is_over(self) -> bool:
        return self._is_stopped or self._end is not None

    def _revive(self) -> None:
        try:
            self._shard.revive()
        except InputError as error:
            raise JobError(
                f"{self._shard.name} ended at batch {self._next} and does not start again: {error}"
            ) from None
        except JobError as error:  # one that is killed while it starts is lost again
            self._was_there = True
            raise LinkLost(f"it ended while it started again: {error}") from None

    def _receive_stream(self) -> None:
        with IndexCall(self._shard.address(), self._shard.credentials) as call:
            with self._changed:
                if self._is_stopped:
                    return
                self._call = call
            try:
                for message in call.hello(self._settings):
                    self._on_message(call, message)
                    if self._end is not None:
                        return
            except CodecError as error:
                raise JobError(f"{self._shard.name} sent something that cannot be read: {error}") from None
            except InputError as error:
                if self._was_there:  # bad data; a refusal came at the start, so it is another daemon now
                    raise
                raise JobError(f"{self._shard.name}: {error}") from None
            finally:
                with self._changed:
                    self._call = self._started = None

    def _on_message(self, call: IndexCall, message: pb.IndexReply) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._was_there = True
            try:
                check_welcome(self._shard.name, message.welcome, self._identity)
            except InputError as error:  # it was checked at the start: it has changed since
                raise JobError(str(error)) from None
            if message.welcome.HasField("file"):
                call.share(message.welcome.file)
            self._start.next_batch = self._next
            self._start.reader_state = self._state_before(self._next)
            call.put(start=self._start)
            with self._changed:
                self._started = call
        elif kind == "part":
            self._on_part(call, message.part)
        elif kind == "end":
            with self._changed:
                self._end = int(message.end.next_batch)
                self._changed.notify_all()
        else:
            raise JobError(f"{self._shard.name} sent a message of no known kind")

    def _on_part(self, call: IndexCall, part: pb.IndexPart) -> None:
        frame = call.frame(part)
        decoded = decode_index(frame)
        if not decoded.indexed.batch_index == part.index == self._next:
            raise JobError(f"{self._shard.name} sent batch {part.index}, expected {self._next}")
        totals = self._totals
        totals.batches += 1
        totals.num_bytes += len(frame)
        totals.busy_s += part.busy_ns / 1e9
        totals.idle_s += part.waited_ns / 1e9
        totals.rss_bytes = part.rss_bytes
        with self._changed:
            self._next += 1
            self._parts.append(decoded)
            self._changed.notify_all()
