"""`Receiver`: a thread that keeps a rank connected to its cacher and receives its batches.

    cacher ──Link──> receiver thread ──queue (at most `credits` batches)──> take()
                     lost: a new Link; Start names the next batch

Batches come in order. A duplicate is dropped. A missing batch, or an End before the last one, counts as a lost
connection.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address
from bagpipe.client.agreement import batches_per_message
from bagpipe.client.codec import CodecError, decode_rank_batch
from bagpipe.client.link import Credentials, Link, LinkLost
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema
from bagpipe.util.documents import parse_json
from bagpipe.util.priority import lower_thread_priority

__all__ = ["Item", "QueueStatistics", "Receiver", "Run"]

_ERRORS: Mapping[str, type[Exception]] = {"InputError": InputError, "CapacityError": CapacityError}

#: The delay between attempts to reach a cacher doubles from the first to the last.
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 1.0
#: Gaps at the same batch before the cacher counts as broken.
_MAX_GAPS = 3
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatistics:
    """Batches received and not yet taken: now, peak, and bound. Also the number of lost connections."""

    current: int
    peak: int
    maximum: int
    reconnects: int


@dataclass(slots=True, kw_only=True)
class Run:
    """A requested phase: `next_batch` is received next, `watermark` taken next; the cacher knows of those `told`."""

    start: pb.Start
    next_batch: int
    watermark: int
    told: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """A received item: a batch or the end of a run, with the run's number; or (`run` None) the schema or an error."""

    run: int | None
    content: RankBatch | pb.End | DataSchema | Exception


class Receiver:
    """Thread-safe between its own thread and one that calls the methods.

    Args:
        address, credentials: of the cacher.
        hello: who this is.
        timeout_s: how long a cacher may be out of reach, or do nothing but welcome us again and again.
    """

    def __init__(self, address: Address, credentials: Credentials, hello: pb.Hello, timeout_s: float) -> None:
        self._address = address
        self._credentials = credentials
        self._hello = hello
        self._timeout_s = timeout_s
        self._batches_per_ack = batches_per_message(hello.credits)
        # Credits bound the batches; one more place for a schema, an End or an error.
        self._received: queue.Queue[Item] = queue.Queue(maxsize=hello.credits + 1)
        self._peak = 0
        self._reconnects = 0
        self._final: Exception | None = None
        self._waited_for: Item | None = None  # what `take` returns next, if `wait` has seen it
        # What both threads use.
        self._lock = threading.Lock()
        self._attempt: Link | None = None
        self._link: Link | None = None  # the attempt, once welcomed and not known to be lost
        self._welcomed_s = 0.0
        self._run: Run | None = None
        self._identity: BatchIdentity | None = None  # set before the schema is queued
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="cacher-client", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """Tell the cacher that the rank is done, and end the thread. What was not taken is dropped."""
        with self._lock:
            self._closing.set()
            attempt, link = self._attempt, self._link
        if link is not None:
            link.put(leave=pb.Leave())
            link.finish()
        deadline_s = time.monotonic() + (0.0 if link is None else _LEAVE_TIMEOUT_S)
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)
            if attempt is not None and time.monotonic() > deadline_s:
                attempt.cancel()

    def ask(self, run: Run) -> None:
        """Request a run's batches from its `next_batch` on. Ends the previous run."""
        with self._lock:
            self._run = run
            if self._link is not None:
                self._send_start(self._link, run)

    def acknowledge(self, run: Run) -> None:
        """One more batch of the run was taken."""
        with self._lock:
            run.watermark += 1
            # After End the cacher does not need it, and a new stream does not know the run.
            if self._link is not None and not run.ended and run.watermark - run.told >= self._batches_per_ack:
                run.told = run.watermark
                self._link.put(ack=pb.Ack(run=run.start.run, watermark=run.watermark))

    def take(self, timeout_s: float | None = None) -> Item:
        """Wait for the next item.

        Raises:
            InputError, CapacityError, JobError: the cacher's error, or its loss. Every later call raises it again.
        """
        item, self._waited_for = self._waited_for, None
        if item is None and self._final is not None and self._received.empty():
            raise self._final
        try:
            item = item or self._received.get(timeout=timeout_s)
        except queue.Empty:
            raise JobError(f"the cacher at {self._address} did not answer within {timeout_s:g} s") from None
        if isinstance(item.content, Exception):
            self._final = item.content  # later calls raise it again
            raise item.content
        return item

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` does not wait, at most so long; of the thread that takes. False: it would."""
        if self._waited_for is None and (self._final is None or not self._received.empty()):
            with suppress(queue.Empty):
                self._waited_for = self._received.get(timeout=timeout_s)
        return self._waited_for is not None or self._final is not None

    def interrupt(self) -> None:
        """Make a waiting `take` raise a JobError. From any thread; no `take` can follow."""
        with suppress(queue.Full):  # then no `take` is waiting
            self._received.put_nowait(Item(run=None, content=JobError("given up: the job has failed")))

    @property
    def identity(self) -> BatchIdentity:
        """Identity of the batches, from the cacher's first Welcome; only after the schema was taken."""
        assert self._identity is not None, "welcomed"
        return self._identity

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            current=self._received.qsize(),
            peak=self._peak,
            maximum=self._hello.credits,
            reconnects=self._reconnects,
        )

    def _drain(self) -> None:
        try:
            while True:
                self._received.get_nowait()
        except queue.Empty:
            pass

    # The receiver thread.

    def _receive(self) -> None:
        lower_thread_priority()  # gRPC's threads, which begin here, inherit it
        try:
            self._keep_connected()
        except (InputError, JobError) as error:
            self._received.put(Item(run=None, content=error))
        except Exception as error:
            self._received.put(Item(run=None, content=JobError(f"the cacher's client failed: {error!r}")))

    def _keep_connected(self) -> None:
        """Open one link after the other until closed. Raises final errors."""
        delay_s, deadline_s, gaps = _FIRST_DELAY_S, time.monotonic() + self._timeout_s, 0
        while not self._closing.is_set():
            progress = self._progress()
            was_welcomed = False
            try:
                with Link(self._address, self._credentials) as link:
                    with self._lock:
                        self._attempt = link
                        if self._closing.is_set():
                            return
                    self._converse(link)
                reason = "it ended the stream"
            except LinkLost as error:
                reason = str(error)
            except _Gap as error:
                gaps = 1 if self._progress() != progress else gaps + 1
                if gaps >= _MAX_GAPS:
                    raise JobError(str(error)) from None
                reason = str(error)
            finally:
                with self._lock:
                    was_welcomed, self._link, self._attempt = self._link is not None, None, None
            now_s = time.monotonic()
            if was_welcomed:
                self._reconnects += 1
                deadline_s += now_s - self._welcomed_s  # the connected time does not count
            # Welcome alone is no progress: a cacher can fail at the same request each time.
            if self._progress() != progress:
                delay_s, deadline_s = _FIRST_DELAY_S, now_s + self._timeout_s
            if now_s + delay_s > deadline_s:
                # Never reached: a wrong address, or a cacher that was not started.
                kind = JobError if self._hello.schema else InputError
                raise kind(f"the cacher at {self._address} was not reached within {self._timeout_s:g} s: {reason}")
            self._closing.wait(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def _progress(self) -> tuple[object, ...]:
        run = self._run
        return (self._hello.schema,) if run is None else (run.start.run, run.next_batch, run.ended)

    def _converse(self, link: Link) -> None:
        """Receive until the stream ends."""
        link.put(hello=self._hello)
        for message in link.messages():
            kind = message.WhichOneof("kind")
            if kind is None and message.rank_batches:
                for rank_batch in message.rank_batches:
                    self._on_batch(rank_batch)
            elif kind == "welcome":
                self._welcome(link, message.welcome)
            elif kind == "end":
                self._on_end(message.end)
            elif kind == "error":
                # If a cacher accepted this rank before and refuses it now, the input is not at fault.
                is_refusal = self._hello.schema and self._link is None
                raise (JobError if is_refusal else _ERRORS.get(message.error.kind, JobError))(message.error.message)
            else:
                raise JobError("the cacher sent a message of no known kind")

    def _welcome(self, link: Link, welcome: pb.Welcome) -> None:
        identity = _identity(welcome.identity)
        if self._identity is None:
            self._hello.schema, self._identity = welcome.schema, identity
            self._received.put(Item(run=None, content=_schema(welcome.schema)))
        else:
            _check_same_batches(self._identity, identity)
        with self._lock:
            if self._closing.is_set():
                link.put(leave=pb.Leave())
                return link.finish()
            self._link, self._welcomed_s = link, time.monotonic()
            if self._run is not None:
                self._send_start(link, self._run)

    def _send_start(self, link: Link, run: Run) -> None:
        run.start.next_batch, run.start.watermark, run.start.ended = run.next_batch, run.watermark, run.ended
        run.told = run.watermark
        link.put(start=run.start)

    def _on_batch(self, message: pb.RankBatch) -> None:
        run = self._run
        if run is None or message.run != run.start.run:
            return  # of an abandoned phase
        if message.index < run.next_batch:
            return  # a duplicate
        if message.index > run.next_batch or run.ended:
            raise _Gap(f"the cacher sent batch {message.index}, expected {run.next_batch}")
        try:
            decoded = decode_rank_batch(bytearray(message.payload))
        except CodecError as error:
            raise JobError(f"the cacher sent something that cannot be read: {error}") from None
        if decoded.batch.index != message.index:
            raise JobError(f"the cacher sent batch {decoded.batch.index} as batch {message.index}")
        run.next_batch += 1
        self._received.put(Item(run=message.run, content=decoded))
        self._peak = max(self._peak, self._received.qsize())

    def _on_end(self, end: pb.End) -> None:
        run = self._run
        if run is not None and end.run == run.start.run and not run.ended:
            if end.next_batch != run.next_batch:
                raise _Gap(f"the cacher ended the run before batch {end.next_batch}, expected {run.next_batch}")
            run.ended = True
            self._received.put(Item(run=end.run, content=end))


class _Gap(Exception):
    """A batch is missing."""


def _check_same_batches(before: BatchIdentity, now: BatchIdentity) -> None:
    """Raise JobError if a cacher that was started again would plan other batches."""
    if before.code != now.code:
        raise JobError(f"the cacher's code has changed since the trainer began: {now.code}, not {before.code}")
    change = before.first_change(now)
    if change is not None:
        raise JobError(f"the data has changed since the trainer began: {change}")


def _identity(text: str) -> BatchIdentity:
    try:
        return BatchIdentity.from_json(parse_json(text))
    except (ValueError, InputError) as error:
        raise JobError(f"the cacher sent an identity of its batches that cannot be read: {error}") from None


def _schema(text: str) -> DataSchema:
    try:
        return DataSchema.from_json(parse_json(text))
    except (ValueError, InputError) as error:
        raise JobError(f"the cacher sent a schema that cannot be read: {error!r}") from None
