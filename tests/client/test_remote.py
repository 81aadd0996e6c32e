"""The client against a misbehaving cacher. (Against real ones: tests/cacher/test_service.py.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.remote import RemoteBatches
from bagpipe.client.shared_ring import RingWriter
from bagpipe.config.sections import CacherConfig, Config
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from data.schema_file import criteo_schema
from tests.client.scripted import Script, batch, end, error, scripted, welcome

SPEC = OracleSpec(table_rows=(10,), features=(FeatureRef(feature=0, table=0),), num_slots=10, lookahead=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scripted.sock"


def start(message: pb.TrainerMessage) -> None:
    assert message.WhichOneof("kind") == "start"


def ack(message: pb.TrainerMessage) -> None:
    assert message.WhichOneof("kind") == "ack"


def client(url: str, *, timeout_s: float = 10, credits: int = 2, **options: object) -> RemoteBatches:
    config = Config(cacher=CacherConfig(timeout_s=timeout_s))
    return RemoteBatches(url, config, credits=credits, **options)  # type: ignore[arg-type]


def indices(rank_batches: Iterator[RankBatch]) -> list[int]:
    return [rank_batch.batch.index for rank_batch in rank_batches]


def received(path: Path, *scripts: Script, **options: float) -> list[int]:
    with scripted(path, *scripts) as (url, _), client(url, **options) as source:  # type: ignore[arg-type]
        return indices(source.batches("train", SPEC))


def test_repeated_batches_are_dropped(path: Path) -> None:
    script = [welcome(), start, batch(0), batch(0), batch(1), batch(0), batch(1), batch(2), end(3), end(3)]
    assert received(path, script, credits=3) == [0, 1, 2]


@pytest.mark.parametrize(
    "file", [None, pb.SharedFile(pid=1 << 30, fd=3, num_bytes=100, nonce=bytes(16))], ids=["no file", "out of reach"]
)
def test_a_message_in_memory_that_is_not_open_is_an_error(path: Path, file: pb.SharedFile | None) -> None:
    first = welcome()
    if file is not None:
        first.welcome.file.CopyFrom(file)
    with pytest.raises(JobError, match="in shared memory, which is not open"):
        received(path, [first, start, pb.CacherMessage(shared=pb.Shared(start=0, num_bytes=10))])


def test_a_message_in_memory_that_is_none_is_an_error(path: Path) -> None:
    with RingWriter(1000) as writer:
        writer.put(b"\xff" * 10)
        file, first = writer.file, welcome()
        first.welcome.file.CopyFrom(pb.SharedFile(pid=file.pid, fd=file.fd, num_bytes=file.num_bytes, nonce=file.nonce))

        def share(message: pb.TrainerMessage) -> None:
            assert message.WhichOneof("kind") == "share"

        for shared in (pb.Shared(start=0, num_bytes=10), pb.Shared(start=0, num_bytes=1001)):
            with pytest.raises(JobError, match="in shared memory that cannot be read"):
                received(path, [first, share, start, pb.CacherMessage(shared=shared)])


def test_a_missing_batch_is_requested_on_a_new_stream(path: Path) -> None:
    first: Script = [welcome(), start, batch(0), batch(2), end(3)]
    second: Script = [welcome(), start, batch(1), batch(2), end(3)]
    with scripted(path, first, second) as (url, requests), client(url) as source:
        assert indices(source.batches("train", SPEC)) == [0, 1, 2]
        assert source.statistics().reconnects >= 1
        again = requests[1][1].start
        assert again.next_batch == 1
        assert requests[1][0].hello.schema  # the schema of its welcome: a cacher with another schema refuses
        assert requests[0][0].hello.instance == requests[1][0].hello.instance


def test_a_cacher_that_always_skips_a_batch_is_broken(path: Path) -> None:
    first: Script = [welcome(), start, batch(0), batch(2)]
    others: Script = [welcome(), start, batch(2)]
    with pytest.raises(JobError, match=r"^the cacher sent batch 2, expected 1$"):
        received(path, first, others, others, others, timeout_s=30)


def test_an_end_before_the_last_batch_is_ignored(path: Path) -> None:
    """Lost batches must not be missing from training."""
    first: Script = [welcome(), start, batch(0), end(3)]
    second: Script = [welcome(), start, batch(1), batch(2), end(3)]
    assert received(path, first, second) == [0, 1, 2]


@pytest.mark.parametrize("next_batch", [0, 1, 3])
def test_a_cacher_that_never_gets_to_the_end_it_names_is_broken(path: Path, next_batch: int) -> None:
    first: Script = [welcome(), start, batch(0), batch(1), end(next_batch)]
    others: Script = [welcome(), start, end(next_batch)]
    with pytest.raises(JobError, match=rf"^the cacher ended the run before batch {next_batch}, expected 2$"):
        received(path, first, others, others, others, timeout_s=30)


def test_a_cacher_that_only_welcomes_is_given_up(path: Path) -> None:
    script: Script = [welcome(), start]
    with scripted(path, *[script] * 1000) as (url, requests), client(url, timeout_s=0.5) as source:
        with pytest.raises(JobError, match=r"was not reached within 0\.5 s: it ended the stream"):
            indices(source.batches("train", SPEC))
        assert len(requests) < 100


def test_a_cacher_with_a_defect_is_not_asked_again(path: Path) -> None:
    def fail(message: pb.TrainerMessage) -> None:
        raise KeyError("defect")

    with scripted(path, [welcome(), fail]) as (url, requests), client(url, timeout_s=30) as source:
        with pytest.raises(JobError, match=r"what listens at unix:.* failed: .*defect"):
            indices(source.batches("train", SPEC))
        assert len(requests) == 1


def test_a_stream_that_ends_early_is_lost(path: Path) -> None:
    assert received(path, [], [welcome()], [welcome(), start, batch(0)], [welcome(), start, batch(1), end(2)]) == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("restarted", "words"),
    [
        ({"code": "d"}, r"^the cacher's code has changed since the trainer began: d, not c$"),
        ({"layout": "pages"}, r"^the data has changed since the trainer began: it is read as 'pages', not as 'lines'$"),
        (
            {"identity": "[]"},
            r"^the cacher sent an identity of its batches that cannot be read: the identity",
        ),
    ],
)
def test_a_restarted_cacher_of_other_batches_is_left(path: Path, restarted: dict[str, str], words: str) -> None:
    """No Start is sent to it."""
    with scripted(path, [welcome(), start, batch(0)], [welcome(**restarted)]) as (url, requests):
        with client(url, timeout_s=30) as source, pytest.raises(JobError, match=words):
            indices(source.batches("train", SPEC))
        assert [message.WhichOneof("kind") for message in requests[1]] == ["hello"]


def test_batches_of_a_phase_left_early_are_dropped(path: Path) -> None:
    script: Script = [
        welcome(),
        start,
        batch(0),
        batch(1),
        ack,
        start,
        batch(2),
        batch(0, run=1),
        end(3),
        end(1, run=1),
    ]
    with scripted(path, script) as (url, _), client(url) as source:
        assert next(source.batches("train", SPEC)).batch.index == 0
        assert indices(source.batches("eval", SPEC)) == [0]


def test_a_new_stream_reports_a_run_that_has_ended(path: Path) -> None:
    """The stream breaks while the run's batches are still to be taken: the new stream gets no Ack."""
    reported = threading.Event()

    def ended(message: pb.TrainerMessage) -> None:
        assert (message.start.run, message.start.ended, message.start.next_batch) == (0, True, 2)
        reported.set()

    def second_run(message: pb.TrainerMessage) -> None:
        assert (message.start.run, message.start.ended) == (1, False)

    first: Script = [welcome(), start, batch(0), batch(1), end(2)]
    second: Script = [welcome(), ended, second_run, batch(0, run=1), end(1, run=1)]
    with scripted(path, first, second) as (url, requests), client(url) as source:
        batches = source.batches("train", SPEC)
        assert reported.wait(30)
        assert indices(batches) == [0, 1]
        assert indices(source.batches("eval", SPEC)) == [0]
        assert [bool(messages[0].hello.schema) for messages in requests[:2]] == [False, True]


def test_every_batch_taken_is_acknowledged(path: Path) -> None:
    watermarks: list[int] = []

    def noted(message: pb.TrainerMessage) -> None:
        ack(message)
        watermarks.append(message.ack.watermark)

    assert received(path, [welcome(), start, batch(0), batch(1), noted, noted, batch(2), noted, end(3)]) == [
        0,
        1,
        2,
    ]
    assert watermarks == [1, 2, 3]


def test_the_queue_is_bounded_even_against_a_cacher_that_ignores_credits(path: Path) -> None:
    """Batches beyond the credits stay in the socket, not in memory."""
    script = [welcome(), start, *map(batch, range(30)), end(30, skipped_rows=4)]
    with scripted(path, script) as (url, _), client(url) as source:
        assert indices(source.batches("train", SPEC)) == list(range(30))
        statistics = source.statistics()
        assert statistics.peak <= statistics.maximum + 1 == 3
        assert (statistics.current, source.skipped_rows()) == (0, 4)


def test_a_wait_for_a_batch_can_be_interrupted(path: Path) -> None:
    released = threading.Event()

    def hold(message: pb.TrainerMessage) -> None:
        ack(message)
        source.interrupt()
        assert released.wait(30)

    with scripted(path, [welcome(), start, batch(0), hold]) as (url, _), client(url, timeout_s=60) as source:
        batches = source.batches("train", SPEC)
        assert next(batches).batch.index == 0
        with pytest.raises(JobError, match="given up: the job has failed"):
            next(batches)
        released.set()


def test_an_interrupt_does_not_wait_for_room(path: Path) -> None:
    script = [welcome(), start, *map(batch, range(30))]
    with scripted(path, script) as (url, _), client(url) as source:
        batches = source.batches("train", SPEC)
        assert next(batches).batch.index == 0
        for _ in range(4):  # the queue has room for three
            source.interrupt()


def test_leaving_with_the_queue_full_does_not_hang(path: Path) -> None:
    script = [welcome(), start, *map(batch, range(30))]
    with scripted(path, script) as (url, _), client(url) as source:
        assert next(source.batches("train", SPEC)).batch.index == 0


@pytest.mark.parametrize(
    ("name", "kind"), [("InputError", InputError), ("CapacityError", CapacityError), ("JobError", JobError)]
)
def test_errors_are_raised_as_their_class(path: Path, name: str, kind: type[Exception]) -> None:
    script = [welcome(), start, batch(0), error(name, "what is wrong")]
    with scripted(path, script) as (url, _), client(url) as source:
        batches = source.batches("train", SPEC)
        assert next(batches).batch.index == 0
        for _ in range(2):  # the error is permanent
            with pytest.raises(kind, match=r"^what is wrong$") as raised:
                next(source.batches("train", SPEC))
            assert type(raised.value) is kind


def test_a_refusal_is_raised_when_entering(path: Path) -> None:
    with scripted(path, [error("InputError", "no such file")]) as (url, _):
        with pytest.raises(InputError, match=r"^no such file$"):
            client(url).__enter__()


def test_a_refusal_after_a_welcome_is_a_job_error(path: Path) -> None:
    """Ranks can see the refusal at different batches, so it ends the job immediately."""
    with pytest.raises(JobError, match=r"^another schema$"):
        received(path, [welcome(), start, batch(0)], [error("InputError", "another schema")])


def test_an_error_of_unknown_class_is_a_job_error(path: Path) -> None:
    with pytest.raises(JobError, match="gone"):
        received(path, [error("SystemExit", "gone")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (batch(0, payload=b"nonsense"), "sent something that cannot be read: "),
        (batch(0, payload=batch(1).rank_batches[0].payload), "sent batch 1 as batch 0"),
        (pb.CacherMessage(), "message of no known kind"),
    ],
)
def test_invalid_messages_in_the_middle_of_a_run(path: Path, line: pb.CacherMessage, message: str) -> None:
    with pytest.raises(JobError, match=message):
        received(path, [welcome(), start, line])


@pytest.mark.parametrize("schema", ["[]", "{", "{}", '{"label": 1}'])
def test_a_schema_that_cannot_be_read(path: Path, schema: str) -> None:
    with pytest.raises(JobError, match="a schema that cannot be read"):
        received(path, [welcome(schema)])


def test_a_listener_that_is_no_cacher(path: Path) -> None:
    """Another gRPC service fails immediately; anything else at the deadline, with its address."""
    import grpc

    server = grpc.server(None)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        with pytest.raises(JobError, match=r"what listens at unix:.* is no bagpipe cacher"):
            client(f"unix:{path}", timeout_s=30).__enter__()
    finally:
        server.stop(None).wait()


def test_a_silent_cacher(path: Path) -> None:
    with scripted(path, [start]) as (url, _), pytest.raises(JobError, match=r"did not answer within 0\.4 s"):
        client(url, timeout_s=0.2).__enter__()


def test_the_schema_is_the_cacher_s(path: Path) -> None:
    with scripted(path, [welcome()]) as (url, _), client(url) as source:
        assert source.schema == criteo_schema()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"credits": 0}, "credits must be at least 1, got 0"), ({"world_size": 2}, "need a common job_id")],
)
def test_invalid_client_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client("unix:/nowhere", **options)  # type: ignore[arg-type]


def test_missing_files_are_named() -> None:
    for key in ("secret_file", "tls_ca"):
        config = Config(cacher=CacherConfig(**{key: "/no/such/file"}))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=rf"^cacher\.{key} /no/such/file: No such file or directory$"):
            RemoteBatches("unix:/nowhere", config, credits=1)
