"""Malicious and broken peers are dropped without effect on a valid trainer of the same daemon.

One daemon process serves the whole file. After each attack a trainer gets every batch, and the memory is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import PROTOCOL_VERSION, settings_of
from bagpipe.oracle.rank_batch import RankBatch
from cacher.planning import PlannedData
from tests.cacher.daemons import Daemon, all_batches, assert_same_batches, config, planned_batches, remote, spec_of

pytestmark = pytest.mark.multiproc

JOB = config(limit=600)
HELLO_TIMEOUT_S = 3.0
#: The planners of begun jobs that are still waited for, 17 MB each, and malloc's leftovers: 60 to 100 MB, depending on
#: the number of concurrent threads. The attacks ask for 900 MB.
MAX_GROWTH_BYTES = 192 << 20
METHOD = "/bagpipe.v1.Cacher/Train"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class Target:
    """The daemon under attack, a valid trainer's expected batches, and the daemon's memory before the first attack."""

    daemon: Daemon
    expected: list[RankBatch]
    rss_bytes: int

    def check(self) -> None:
        """Assert that a valid trainer is served and that the memory is bounded."""
        [rank_batches] = all_batches(self.daemon.url, JOB, job_id="good")
        assert_same_batches(rank_batches, self.expected)
        assert self.daemon.process.poll() is None
        assert self.daemon.rss_bytes() < self.rss_bytes + MAX_GROWTH_BYTES

    def connect(self) -> socket.socket:
        host, _, port = self.daemon.url.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=250)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.daemon.url, options=[("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    flags = ("--hello-timeout-s", str(HELLO_TIMEOUT_S), "--grace-s", "1", "--max-jobs", "64")
    with Daemon(JOB, "127.0.0.1:0", *flags) as daemon:
        expected = planned_batches(JOB)[0]
        assert_same_batches(all_batches(daemon.url, JOB)[0], expected)
        found = Target(daemon=daemon, expected=expected, rss_bytes=daemon.rss_bytes())
        yield found
        found.check()
        assert not [line for line in daemon.logs if "traceback" in line or "time" not in line]


def hello(**changes: Any) -> pb.TrainerMessage:
    values = {
        "protocol": PROTOCOL_VERSION,
        "job_id": "hostile",
        "instance": "one",
        "rank": 0,
        "world_size": 1,
        "credits": 2,
        "settings": json.dumps(settings_of(JOB)),
    }
    return pb.TrainerMessage(hello=pb.Hello(**{**values, **changes}))


def spec_text(**changes: Any) -> str:
    spec = dataclasses.asdict(spec_of(JOB, PlannedData(JOB.data, JOB.run.seed).schema))
    return json.dumps({**spec, **changes})


def start(**changes: Any) -> pb.TrainerMessage:
    spec = spec_text()
    return pb.TrainerMessage(start=pb.Start(**{"phase": "train", "spec": spec, **changes}))


def ack(watermark: int, run: int = 0) -> pb.TrainerMessage:
    return pb.TrainerMessage(ack=pb.Ack(run=run, watermark=watermark))


LEAVE = pb.TrainerMessage(leave=pb.Leave())


def say(target: Target, messages: Sequence[bytes], *, half_close: bool = True) -> tuple[list[Any], grpc.StatusCode]:
    """All answers to these raw messages, and the status of the stream."""
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in messages:
        requests.put(message)
    if half_close:
        requests.put(None)
    answers = []
    with target.channel() as channel:
        call = channel.stream_stream(METHOD)(iter(requests.get, None), timeout=250)
        try:
            for data in call:
                answers.append(pb.CacherMessage.FromString(data))
        except grpc.RpcError:
            pass
        requests.put(None)
        return answers, call.code()


def said(target: Target, *messages: pb.TrainerMessage, **options: bool) -> tuple[list[str], grpc.StatusCode]:
    """As `say`, for well-formed messages: kinds of the answers, errors as text, and the status."""
    answers, code = say(target, [message.SerializeToString() for message in messages], **options)
    words = [
        answer.error.message if answer.WhichOneof("kind") == "error" else answer.WhichOneof("kind") or "rank_batches"
        for answer in answers
    ]
    return words, code


# ---- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 100, b"\x0a\x02\x0a\xff"])
def test_an_invalid_message_drops_the_stream(target: Target, data: bytes) -> None:
    assert say(target, [data]) == ([], grpc.StatusCode.INVALID_ARGUMENT)
    answers, code = say(target, [hello().SerializeToString(), data])
    assert [answer.WhichOneof("kind") for answer in answers] == ["welcome"]
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "messages",
    [
        [start()],
        [ack(0)],
        [LEAVE],
        [hello(), hello()],
        [hello(), ack(0)],
        [hello(), start(), ack(1 << 60)],
        [hello(), start(), ack(0, run=1)],
    ],
)
def test_messages_out_of_order_drop_the_stream(target: Target, messages: list[pb.TrainerMessage]) -> None:
    _, code = said(target, *messages, half_close=False)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello(protocol=99), f"protocol version: the cacher speaks {PROTOCOL_VERSION}, the trainer 99"),
        (hello(job_id=""), "job id: expected 1 to 200 printable characters, got ''"),
        (hello(job_id="x" * 201), "job id: expected 1 to 200 printable characters"),
        (hello(instance="a\nb"), "instance: expected 1 to 200 printable characters"),
        (hello(rank=1), "rank: expected 0 to 0, got 1"),
        (hello(world_size=0), "world size: expected 1 to 1024, got 0"),
        (hello(world_size=1 << 31), "world size: expected 1 to 1024, got 2147483648"),
        (hello(credits=0), "credits: expected 1 to 1024, got 0"),
        (hello(credits=1 << 31), "credits: expected 1 to 1024, got 2147483648"),
        (hello(settings="{"), "settings: expected a JSON object"),
        (hello(settings="[" * 100_000), "settings: expected a JSON object"),
        (hello(settings="{}"), "data.path: the cacher has '', the trainer nothing"),
        (hello(schema='{"label": "other"}'), "data schema, label: the cacher has 'label', the trainer 'other'"),
    ],
)
def test_a_hello_that_is_refused(target: Target, message: pb.TrainerMessage, words: str) -> None:
    [answer], code = said(target, message)
    assert answer.startswith(words)
    assert code is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (start(phase="test"), "phase must be train or eval, got 'test'"),
        (start(spec="[]"), "oracle spec: expected a JSON object"),
        (start(spec='{"features": 7}'), "oracle spec: expected at most 416 pairs of a feature and a table"),
        (start(spec='{"features": [{}]}'), "oracle spec: expected a feature and a table number"),
        (start(spec='{"features": [{"feature": 99, "table": 0}]}'), "oracle spec: expected a feature from 0 to 25"),
        (start(spec='{"features": [{"feature": 0, "table": 5}]}'), "oracle spec: expected a table from 0 to 0"),
        (start(spec='{"features": []}'), "oracle spec, table_rows: the cacher has [], the trainer nothing"),
        (start(spec=spec_text(example_shares=[1, 1])), "oracle spec: expected up to 1 example shares, got [1, 1]"),
        (start(spec=spec_text(example_shares=[True])), "oracle spec: expected up to 1 example shares, got [True]"),
        (start(spec=spec_text(example_shares="1")), "oracle spec: expected up to 1 example shares, got 1"),
        (start(spec=spec_text(rows_delay=2)), "oracle spec: expected rows_delay 0 or 1, got 2"),
        (start(spec=spec_text(example_shares=[-1])), "example shares: expected a number from 0 to"),
        (start(watermark=3), "expected first batch and watermark up to the next batch"),
        (start(first_batch=3), "expected first batch and watermark up to the next batch"),
    ],
)
def test_a_start_that_is_refused(target: Target, message: pb.TrainerMessage, words: str) -> None:
    [_, answer], code = said(target, hello(), message, half_close=False)
    assert answer.startswith(words)
    assert code is grpc.StatusCode.OK


def test_replayed_requests(target: Target) -> None:
    """A repeated Start is answered from its position; repeated acknowledgements are ignored."""
    messages = [hello(), start(), ack(1), start(next_batch=1, watermark=1), ack(1), ack(1), LEAVE]
    words, code = said(target, *messages)
    assert set(words) <= {"welcome", "rank_batches"}
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)  # ack(1) can arrive before batch 0 was sent
    target.check()


MESSAGES = st.one_of(
    st.builds(hello, rank=st.integers(0, 3), world_size=st.integers(0, 3), credits=st.integers(0, 3)),
    st.builds(
        start, next_batch=st.integers(0, 20), watermark=st.integers(0, 20), run=st.integers(0, 2), ended=st.booleans()
    ),
    st.builds(ack, st.integers(0, 2**64 - 1), st.integers(0, 2)),
    st.just(LEAVE),
    st.just(pb.TrainerMessage()),
).map(lambda message: message.SerializeToString())


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A message with some bytes changed, cut off or repeated."""
    data = bytearray(draw(MESSAGES))
    for _ in range(draw(st.integers(1, 3))):
        if data:
            place = draw(st.integers(0, len(data) - 1))
            data[place] ^= draw(st.integers(1, 255))
    data = data[: draw(st.integers(0, len(data)))]
    return bytes(data) * draw(st.integers(1, 2))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES | mangled() | st.binary(max_size=40), max_size=6))
def test_any_messages_in_any_order(target: Target, messages: list[bytes]) -> None:
    answers, _ = say(target, [hello(job_id="fuzz").SerializeToString(), *messages])
    assert len(answers) <= 20


# ---- below the protocol ----------------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes, *, length: int | None = None) -> bytes:
    """An HTTP/2 frame; `length` is the length in its header."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without indexing, uncompressed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


SETTINGS = frame(4, 0, 0, b"")
HEADERS = frame(
    1,
    4,
    1,
    literal(":method", "POST")
    + literal(":scheme", "http")
    + literal(":path", METHOD)
    + literal(":authority", "x")
    + literal("te", "trailers")
    + literal("content-type", "application/grpc"),
)
GOOD_START = PREFACE + SETTINGS + HEADERS


def dialogue(payload: bytes) -> bytes:
    """All bytes of a call up to and including one gRPC message."""
    return GOOD_START + frame(0, 0, 1, b"\x00" + struct.pack(">I", len(payload)) + payload)


def throw(target: Target, data: bytes) -> None:
    """Send bytes and disconnect without reading."""
    with target.connect() as connection, suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.05)
        connection.recv(1 << 16)


def test_the_handmade_bytes_are_a_valid_call(target: Target) -> None:
    """The control for the attacks below: the handmade bytes are a valid call."""
    with target.connect() as connection:
        connection.sendall(dialogue(hello(job_id="bytes").SerializeToString()))
        heard = b""
        while b"criteo" not in heard and b'"label"' not in heard:
            part = connection.recv(1 << 16)
            assert part
            heard += part


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), opening=st.sampled_from([b"", PREFACE, PREFACE + SETTINGS, GOOD_START]))
def test_garbage_bytes(target: Target, data: bytes, opening: bytes) -> None:
    throw(target, opening + data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), flip=st.none() | st.tuples(st.floats(0, 0.999), st.integers(1, 255)))
def test_a_truncated_or_modified_call(target: Target, share: float, flip: tuple[float, int] | None) -> None:
    data = bytearray(dialogue(hello(job_id="cut").SerializeToString()) + frame(0, 1, 1, b""))
    if flip is not None:
        data[int(flip[0] * len(data))] ^= flip[1]
    throw(target, bytes(data[: int(share * len(data)) + 1]))


@pytest.mark.parametrize(
    "data",
    [
        PREFACE + frame(0, 0, 1, b"", length=(1 << 24) - 1),
        GOOD_START + frame(0, 0, 1, b"\x00\xff\xff\xff\xff"),
        GOOD_START + frame(0, 0, 1, b"\x00" + struct.pack(">I", 900 << 20) + b"x" * 1000),
        GOOD_START + frame(0, 0, 1, b"\x01" + struct.pack(">I", 4) + b"gzip"),
        PREFACE + SETTINGS + frame(1, 4, 1, literal("x", "y" * 100) * 2000)[: 1 << 18],
        PREFACE + SETTINGS * 5000,
        PREFACE + frame(6, 0, 0, b"12345678") * 5000,
        PREFACE + SETTINGS + HEADERS + frame(3, 0, 1, struct.pack(">I", 8)) * 1000,
        PREFACE + SETTINGS + frame(1, 0, 1, b"") + frame(9, 0, 1, b"") * 5000,
    ],
    ids=[
        "frame length",
        "message length",
        "900 MB",
        "compressed",
        "headers",
        "settings",
        "pings",
        "resets",
        "continuation",
    ],
)
def test_false_sizes(target: Target, data: bytes) -> None:
    throw(target, data)
    target.check()


def test_an_oversized_message_is_refused_by_its_length(target: Target) -> None:
    answers, code = say(target, [hello(settings="x" * (2 << 20)).SerializeToString()])
    assert (answers, code) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
    target.check()


def test_silent_streams_are_dropped(target: Target) -> None:
    answers, code = say(target, [], half_close=False)
    assert (answers, code) == ([], grpc.StatusCode.INVALID_ARGUMENT)


def test_one_byte_at_a_time_is_too_slow(target: Target) -> None:
    """A connection that never completes HTTP/2 setup is closed by the handshake's deadline."""
    with target.connect() as connection:
        connection.settimeout(60)
        connection.sendall(PREFACE[:1])
        heard = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 10):
                heard += part


def test_a_thousand_idle_connections_block_no_trainer(target: Target) -> None:
    """500 silent connections, 500 with a silent stream, and a few that read nothing."""
    with ExitStack() as stack:
        trainer = stack.enter_context(remote(target.daemon.url, JOB, job_id="patient"))
        rank_batches = trainer.batches("train", spec_of(JOB, trainer.schema))
        taken = [next(rank_batches)]
        for number in range(1000):
            connection = stack.enter_context(target.connect())
            if number % 2:
                connection.sendall(GOOD_START)
            if number % 100 == 99:
                connection.sendall(dialogue(hello(job_id=f"idle {number}").SerializeToString())[len(GOOD_START) :])
                taken.append(next(rank_batches))
        target.check()
        assert_same_batches(taken + list(rank_batches), target.expected)
    target.check()


def test_a_trainer_that_reads_nothing_holds_no_more_than_its_credits(target: Target, tmp_path: Path) -> None:
    messages = [hello(job_id="deaf", credits=1024), start()]
    with target.connect() as connection:
        data = GOOD_START
        for message in messages:
            payload = message.SerializeToString()
            data += frame(0, 0, 1, b"\x00" + struct.pack(">I", len(payload)) + payload)
        connection.sendall(data)
        target.check()
