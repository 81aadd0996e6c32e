"""Both ends of the cacher's socket against peers that lie, hang up, or do not read: scripted over a bare socket."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator

import pytest

from bagpipe.client.remote import RemoteSteps
from bagpipe.client.step import Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.proto.channel import Channel, Kind
from bagpipe.proto.codec import decode_step, encode_step
from cacher.service import serve
from data.schema import criteo_schema
from data.synthetic_options import synthetic_schema
from tests.cacher.test_service import DATA, spec_for
from tests.proto.steps import example_step

SPEC = OracleSpec(table_rows=(None,), features=(), num_slots=1, lookahead=1)


class FakeCacher:
    """A client under test, and the channel of a cacher that does what the test says."""

    def __init__(self, credits: int = 2) -> None:
        self._ours, theirs = socket.socketpair()
        theirs.settimeout(30)
        self.socket = theirs
        self.channel = Channel(theirs)
        self.steps = RemoteSteps(Channel(self._ours), credits=credits)

    def open(self) -> None:
        self.channel.send_json(Kind.SCHEMA, criteo_schema().to_json())
        self.steps.open(DataConfig(), 3)
        request = self.channel.receive()
        assert request is not None
        assert request.kind is Kind.OPEN
        assert (request.json()["seed"], request.json()["credits"]) == (3, self.steps.statistics().maximum)

    def send(self, number: int) -> None:
        self.channel.send(Kind.STEP, encode_step(example_step(number)))

    def close(self) -> None:
        self.channel.close()
        self.steps.close()


@pytest.fixture
def cacher(no_leaks: None) -> Iterator[FakeCacher]:
    fake = FakeCacher()
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("name", "kind"), [("InputError", InputError), ("CapacityError", CapacityError), ("JobError", JobError)]
)
def test_errors_are_raised_as_their_class(cacher: FakeCacher, name: str, kind: type[Exception]) -> None:
    cacher.open()
    cacher.send(0)
    cacher.channel.send_json(Kind.ERROR, {"name": name, "message": "what is wrong"})
    steps = cacher.steps.steps("train", SPEC)
    assert next(steps).batch.index == 0
    with pytest.raises(kind, match=r"^what is wrong$") as raised:
        next(steps)
    assert type(raised.value) is kind


def test_an_error_of_no_known_name_is_the_job_s(cacher: FakeCacher) -> None:
    cacher.channel.send_json(Kind.ERROR, {"name": "SystemExit", "message": "gone"})
    with pytest.raises(JobError, match="gone"):
        cacher.steps.open(DataConfig(), 0)


def test_what_the_cacher_said_last_is_heard_before_that_it_is_gone(cacher: FakeCacher) -> None:
    """The trainer's request may find the socket closed; the reason is still on its way."""
    cacher.open()
    cacher.channel.send_json(Kind.ERROR, {"name": "InputError", "message": "no such file"})
    cacher.channel.close()
    with pytest.raises(InputError, match="no such file"):
        next(cacher.steps.steps("train", SPEC))


@pytest.mark.parametrize("when", ["before the schema", "before the first step", "after a step"])
def test_a_peer_that_hangs_up(cacher: FakeCacher, when: str) -> None:
    if when == "before the schema":
        cacher.channel.close()
        with pytest.raises(JobError, match="the cacher process ended unexpectedly"):
            cacher.steps.open(DataConfig(), 0)
        return
    cacher.open()
    if when == "after a step":
        cacher.send(0)
    cacher.channel.close()
    with pytest.raises(JobError, match="the cacher process ended unexpectedly"):
        list(cacher.steps.steps("train", SPEC))
    # The end stays the end: nobody waits for what cannot come.
    with pytest.raises(JobError, match="the cacher process ended unexpectedly"):
        list(cacher.steps.steps("eval", SPEC))


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (Kind.STEP, b"nonsense", "cannot be read: malformed frame|cannot be read: expected a frame"),
        (Kind.END, b"[]", "END frame that cannot be read"),
        (Kind.ERROR, b"{", "ERROR frame that cannot be read"),
        (Kind.SCHEMA, b"{}", "SCHEMA frame in the middle of the steps"),
        (Kind.ACK, b"", "ACK frame in the middle of the steps"),
    ],
)
def test_a_peer_that_sends_nonsense(cacher: FakeCacher, kind: Kind, payload: bytes, message: str) -> None:
    cacher.open()
    cacher.channel.send(kind, payload)
    with pytest.raises(JobError, match=message):
        next(cacher.steps.steps("train", SPEC))


def test_a_peer_that_sends_no_frames(cacher: FakeCacher) -> None:
    cacher.open()
    cacher.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(JobError, match="the cacher sent something that cannot be read: expected a frame"):
        next(cacher.steps.steps("train", SPEC))


def test_the_queue_is_bounded_even_against_a_cacher_that_ignores_credits(no_leaks: None) -> None:
    """Steps beyond the credits stay in the socket, not in memory."""
    fake = FakeCacher(credits=2)
    fake.open()
    for number in range(20):
        fake.send(number)
    fake.channel.send_json(Kind.END, {"skipped_rows": 4})
    indices = [step.batch.index for step in fake.steps.steps("train", SPEC)]
    assert indices == list(range(20))
    statistics = fake.steps.statistics()
    assert statistics.maximum == 2
    assert statistics.peak <= 3
    assert statistics.current == 0
    assert fake.steps.skipped_rows() == 4
    fake.close()


def test_every_step_taken_is_acknowledged(cacher: FakeCacher) -> None:
    cacher.open()
    for number in range(2):
        cacher.send(number)
    steps = cacher.steps.steps("train", SPEC)
    assert [next(steps).batch.index for _ in range(2)] == [0, 1]
    kinds = []
    for _ in range(3):
        frame = cacher.channel.receive()
        assert frame is not None
        kinds.append(frame.kind)
    assert kinds == [Kind.START, Kind.ACK, Kind.ACK]


def test_credits_must_be_there() -> None:
    with socket.socket() as unused, pytest.raises(ValueError, match="credits must be at least 1, got 0"):
        RemoteSteps(Channel(unused), credits=0)


# ---- the served side -------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(no_leaks: None) -> Iterator[socket.socket]:
    """The bare socket of a trainer whose cacher serves in a thread; the cacher must end when it is closed."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    thread = threading.Thread(target=serve, args=(Channel(theirs),), name="served-cacher")
    thread.start()
    yield ours
    ours.close()
    thread.join(30)
    assert not thread.is_alive()


def open_data(channel: Channel, credits: int) -> None:
    channel.send_json(Kind.OPEN, {"data": dataclasses.asdict(DATA), "seed": 5, "credits": credits})
    frame = channel.receive()
    assert frame is not None
    assert frame.kind is Kind.SCHEMA


def start(channel: Channel) -> None:
    spec = spec_for(synthetic_schema(26))
    channel.send_json(Kind.START, {"phase": "train", "spec": dataclasses.asdict(spec), "max_steps": 0})


def received_step(channel: Channel) -> Step:
    frame = channel.receive()
    assert frame is not None
    assert frame.kind is Kind.STEP
    return decode_step(frame.payload)


@pytest.mark.parametrize("credits", [1, 3])
def test_no_step_is_sent_without_a_credit(trainer: socket.socket, credits: int) -> None:
    """A request that follows the last credit is answered by the step that the credit buys, and by nothing before."""
    channel = Channel(trainer)
    open_data(channel, credits)
    start(channel)
    indices = [received_step(channel).batch.index for _ in range(credits)]
    trainer.settimeout(0.3)
    with pytest.raises(TimeoutError):
        trainer.recv(1)
    trainer.settimeout(30)
    channel.send(Kind.ACK)
    indices.append(received_step(channel).batch.index)
    assert indices == list(range(credits + 1))


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\xff" * 64])
def test_a_trainer_that_sends_nonsense_or_nothing(trainer: socket.socket, sent: bytes) -> None:
    """The fixture sees the cacher end."""
    trainer.sendall(sent)


@pytest.mark.parametrize("payload", [b"[]", b"{", b'{"data": {}}', b'{"credits": "many"}', b'{"credits": -1}'])
def test_a_request_that_cannot_be_read_ends_the_service(trainer: socket.socket, payload: bytes) -> None:
    channel = Channel(trainer)
    channel.send(Kind.OPEN, payload)
    frame = channel.receive()
    assert frame is None or frame.kind is Kind.ERROR


def test_steps_before_data_are_an_error(trainer: socket.socket) -> None:
    channel = Channel(trainer)
    start(channel)
    frame = channel.receive()
    assert frame is not None
    assert frame.json() == {"name": "InputError", "message": "unexpected START frame"}


def test_a_defect_in_the_cacher_reaches_the_trainer(trainer: socket.socket) -> None:
    channel = Channel(trainer)
    channel.send_json(Kind.OPEN, {"data": {"no_such_key": 1}, "seed": 5, "credits": 1})
    frame = channel.receive()
    assert frame is not None
    assert frame.json()["name"] == "JobError"
    assert "the cacher failed: TypeError" in frame.json()["message"]


def test_a_trainer_that_leaves_while_steps_are_sent(trainer: socket.socket) -> None:
    """Nobody reads: the socket's buffer fills, the sender waits, and the closed socket ends it."""
    channel = Channel(trainer)
    open_data(channel, 10_000)
    start(channel)
    received_step(channel)
