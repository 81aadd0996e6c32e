"""Jobs that bring their own batches at a daemon: what it refuses, what it drops, and what it frees."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.access import Cacher
from bagpipe.client.agreement import MAX_IDS_BYTES, PROTOCOL_VERSION
from bagpipe.errors import InputError, JobError
from bagpipe.lookahead.frames import FrameKind, encode_spec
from bagpipe.lookahead.ids import encode_ids
from bagpipe.lookahead.pieces import pieces_of
from bagpipe.lookahead.remote import RemotePlanner
from bagpipe.types.batch import Batch
from cacher.plan_service import MAX_STREAMS_OF_JOB
from tests.cacher.daemons import Daemon, all_batches, assert_same_batches, config, free_port, planned_batches
from tests.cacher.test_metrics import scrape
from tests.lookahead.plan_daemons import plan_daemon
from tests.lookahead.streams import batch_of, batches_of, expected_parts, plain_part, spec_of
from tests.store.nodes import await_true

pytestmark = pytest.mark.multiproc

METHOD = "/bagpipe.v1.Cacher/Plan"
HELLO_TIMEOUT_S = 5.0
#: Threads of planners that are ending, 33 MB each with their windows, and malloc's leftovers.
MAX_GROWTH_BYTES = 192 << 20
START, BATCH, END = FrameKind.START, FrameKind.BATCH, FrameKind.END


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon under attack. At the end it serves a job, with about as much memory as before."""
    flags = ("--hello-timeout-s", str(HELLO_TIMEOUT_S), "--max-jobs", "64", "--plan-gib", "0.25")
    with plan_daemon(tmp_path_factory.mktemp("daemon"), *flags) as daemon:
        check(daemon)
        before = daemon.rss_bytes()
        yield daemon
        check(daemon)
        assert daemon.process.poll() is None
        assert daemon.rss_bytes() < before + MAX_GROWTH_BYTES
        assert not [line for line in daemon.logs if "traceback" in line or "time" not in line]


def check(daemon: Daemon) -> None:
    """Assert that a job is served."""
    with RemotePlanner(spec_of(), Cacher(daemon.url)) as planner:
        found = [plain_part(part) for part in planner.run(batches_of(9))]
    assert found == expected_parts(batches_of(9), spec_of())


def hello(**changes: Any) -> pb.PlanRequest:
    return pb.PlanRequest(hello=pb.PlanHello(**{"protocol": PROTOCOL_VERSION, "job_id": "hostile", **changes}))


def frame(kind: int, *parts: Any, run: int = 1) -> list[pb.PlanRequest]:
    return [pb.PlanRequest(piece=piece) for piece in pieces_of(kind, run, parts)]


def start(**spec: int) -> list[pb.PlanRequest]:
    return frame(START, encode_spec(spec_of(**spec)))


def ids(batch: Batch) -> list[pb.PlanRequest]:
    return frame(BATCH, *encode_ids(batch))


def header(*words: int) -> bytes:
    return np.array(words, np.int64).tobytes()


def say(daemon: Daemon, messages: Sequence[bytes], *, half_close: bool = False) -> tuple[list[Any], grpc.StatusCode]:
    """All replies to these raw messages until the daemon ends the stream, and its status."""
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in (*messages, *([None] if half_close else [])):
        requests.put(message)
    replies = []
    with grpc.insecure_channel(daemon.url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(METHOD)(iter(requests.get, None), timeout=250)
        with suppress(grpc.RpcError):
            replies.extend(pb.PlanReply.FromString(data) for data in call)
        requests.put(None)
        return replies, call.code()


def said(daemon: Daemon, *messages: pb.PlanRequest, half_close: bool = False) -> tuple[list[Any], grpc.StatusCode]:
    """As `say`: kinds of the replies, and of the frames in them; errors as text."""
    replies, code = say(daemon, [message.SerializeToString() for message in messages], half_close=half_close)
    kinds = {"welcome": lambda reply: "welcome", "error": lambda reply: reply.error.message}
    return [kinds.get(r.WhichOneof("kind"), lambda reply: reply.piece.kind)(r) for r in replies], code


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_daemon_with_data_plans_too(tmp_path: Path) -> None:
    job = config(limit=400)
    with Daemon(job, f"unix:{tmp_path}/c.sock") as daemon:
        check(daemon)
        assert_same_batches(all_batches(daemon.url, job)[0], planned_batches(job)[0])


def test_a_daemon_without_data_refuses_jobs_that_need_some(daemon: Daemon) -> None:
    with pytest.raises(InputError, match=r"^the cacher has no data: it was started to plan only \(--plan-only\)$"):
        all_batches(daemon.url, config())


def test_a_stream_that_is_closed_early_frees_its_job(tmp_path: Path) -> None:
    """With room for a single job, one after the other is closed in the middle of a run."""
    port = free_port()
    with plan_daemon(tmp_path, "--max-jobs", "1", "--metrics", f"127.0.0.1:{port}") as daemon:
        for _ in range(5):
            with RemotePlanner(spec_of(), Cacher(daemon.url)) as planner:
                run = planner.run(batches_of(50))
                assert len(list(itertools.islice(run, 5))) == 5
                found = scrape(port)
                assert found["bagpipe_cacher_jobs"] == 1
                assert 1 <= found["bagpipe_cacher_planners"] <= MAX_STREAMS_OF_JOB
                assert found["bagpipe_cacher_batches_planned_total"] >= 5
                assert found["bagpipe_cacher_plan_seconds_total"] > 0
                # A batch is counted after it is sent, and so after it may have arrived.
                await_true(lambda: scrape(port)["bagpipe_cacher_batches_sent_total"] >= 5, "five batches sent")
                found = scrape(port)
                assert found["bagpipe_cacher_sent_bytes_total"] > 1000
            while scrape(port)["bagpipe_cacher_planners"]:
                pass
        assert daemon.events().count("plan job started") == daemon.events().count("plan job ended") == 5


def test_the_streams_of_a_process_are_one_job_and_bounded(tmp_path: Path) -> None:
    with plan_daemon(tmp_path, "--max-jobs", "1") as daemon, ExitStack() as stack:
        for _ in range(MAX_STREAMS_OF_JOB):
            stack.enter_context(RemotePlanner(spec_of(), Cacher(daemon.url)))
        with pytest.raises(JobError, match=rf"^the job has {MAX_STREAMS_OF_JOB} planners already, at most"):
            RemotePlanner(spec_of(), Cacher(daemon.url)).open()
        [refusal], _ = said(daemon, hello(job_id="another"))
        assert refusal == "the cacher serves 1 jobs already, at most 1"


def test_planners_that_ask_for_nothing_make_room(tmp_path: Path) -> None:
    with plan_daemon(tmp_path, "--max-jobs", "1", "--start-timeout-s", "0.001") as daemon:
        with RemotePlanner(spec_of(), Cacher(daemon.url)) as idle, RemotePlanner(spec_of(), Cacher(daemon.url)):
            assert said(daemon, hello(job_id="another"), half_close=True)[0] == ["welcome"]
            with pytest.raises(JobError, match=r"the job asked for nothing in 0\.001 s and made room for another"):
                list(idle.run(batches_of(50)))
        with RemotePlanner(spec_of(), Cacher(daemon.url)) as planner:
            run = planner.run(batches_of(50))
            next(run)
            assert said(daemon, hello(job_id="another"))[0] == ["the cacher serves 1 jobs already, at most 1"]
            assert len(list(run)) == 49
        while daemon.events().count("plan job ended") < 3:
            pass


def test_a_drain_lets_runs_finish(tmp_path: Path) -> None:
    with plan_daemon(tmp_path) as daemon:
        with RemotePlanner(spec_of(), Cacher(daemon.url)) as planner:
            run = planner.run(batches_of(50))
            next(run)
            daemon.process.send_signal(signal.SIGTERM)
            while "signal" not in daemon.events():
                pass
            [refusal], _ = said(daemon, hello(job_id="late"))
            assert refusal == "the cacher is shutting down and takes no new jobs"
            with RemotePlanner(spec_of(), Cacher(daemon.url)) as evaluation:  # of the same job
                assert len(list(evaluation.run(batches_of(5)))) == 5
            assert len(list(run)) == 49
        assert daemon.process.wait(30) == 0


def test_planners_have_a_limit_of_memory(daemon: Daemon) -> None:
    spec = spec_of(num_slots=10_000_000)
    with RemotePlanner(spec, Cacher(daemon.url)) as planner, pytest.raises(InputError) as raised:
        list(planner.run(batches_of(5)))
    assert "the cacher allows 0.25 GiB (--plan-gib)" in str(raised.value)
    with RemotePlanner(spec_of(num_slots=100, lookahead=1000), Cacher(daemon.url)) as planner:
        [large] = batches_of(1, size=200_000)
        run = planner.run(dataclasses.replace(large, index=index) for index in range(1000))
        with pytest.raises(InputError, match=r"planning may take 0\.27\d* GiB .* window, the cacher allows 0\.25 GiB"):
            list(run)


# ---- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello(protocol=99), f"protocol version: the cacher speaks {PROTOCOL_VERSION}, the trainer 99"),
        (hello(job_id=""), "job id: expected 1 to 200 printable characters, got ''"),
        (hello(job_id="a\nb"), "job id: expected 1 to 200 printable characters, got 'a\\nb'"),
    ],
)
def test_a_hello_that_is_refused(daemon: Daemon, message: pb.PlanRequest, words: str) -> None:
    assert said(daemon, message) == ([words], grpc.StatusCode.OK)


def test_a_spec_that_is_refused_ends_the_run_alone(daemon: Daemon) -> None:
    batch = ids(batch_of(0, 1))
    replies, code = said(
        daemon,
        hello(),
        *[*frame(START, b"{}"), *batch, *frame(END)],
        *[*start(), *batch, *frame(END)],
        *[*start(), *frame(FrameKind.PLAN)],  # drops the stream
    )
    assert replies == ["welcome", FrameKind.ERROR, FrameKind.PLAN, FrameKind.END]
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "messages",
    [
        [pb.PlanRequest()],
        start(),
        [hello(), hello()],
        [hello(), pb.PlanRequest(piece=pb.Piece(data=b"x"))],
        [hello(), pb.PlanRequest(piece=pb.Piece(kind=BATCH, num_bytes=MAX_IDS_BYTES + 1))],
        [hello(), pb.PlanRequest(piece=pb.Piece(kind=BATCH, num_bytes=2**64 - 1, data=b"x"))],
        [hello(), *start(), *frame(BATCH)],
        [hello(), *start(), *frame(BATCH, bytes(48))],
        [hello(), *start(), *frame(BATCH, header(0, 1, 1 << 60, 1 << 60, 1, 0))],
        [hello(), *start(), *frame(BATCH, header(0, 1 << 62, 0, 0, 1, 0))],
        [hello(), *start(), *frame(BATCH, header(0, 0, 1 << 62, 0, 1, 0))],
        [hello(), *start(), *frame(BATCH, header(0, 1, 1, 1, 1, 1 << 40, 5))],
        [hello(), *start(), *frame(BATCH, header(-1, 1, 1, 1, 1, 0, 5))],
        [hello(), *start(), *ids(batch_of(1 << 40, 5))],
        [hello(), *start(), *ids(batch_of(0, 5)), *ids(batch_of(2, 5))],
        [hello(), *start(), *ids(batch_of(3, 5)), *ids(batch_of(3, 5))],
        [hello(), *start(), *frame(FrameKind.PLAN, b"x")],
        [hello(), *start(), *frame(1 << 31)],
        [hello(), *start(), *frame(END, run=2)],
    ],
)
def test_what_breaks_the_protocol_drops_the_stream(daemon: Daemon, messages: list[pb.PlanRequest]) -> None:
    replies, code = said(daemon, *messages)
    assert replies in ([], ["welcome"])
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_silent_stream_is_dropped(daemon: Daemon) -> None:
    assert said(daemon) == ([], grpc.StatusCode.INVALID_ARGUMENT)


def test_a_message_that_is_too_large_is_refused_by_its_length(daemon: Daemon) -> None:
    replies, code = say(daemon, [hello().SerializeToString(), bytes(2 << 20)])
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(replies) <= 1


def test_a_job_that_reads_nothing_stops_its_own_planner(daemon: Daemon) -> None:
    """It sends far more than the daemon may hold for it."""
    stops = [False]
    largest = 0
    large = batch_of(0, *range(100), *[0] * 60_000)

    def requests() -> Iterator[bytes]:
        nonlocal largest
        yield hello(job_id="deaf").SerializeToString()
        for message in start(num_slots=100, lookahead=1):
            yield message.SerializeToString()
        for index in itertools.count():
            for message in ids(dataclasses.replace(large, index=index)):
                if stops[0] or index > 2000:
                    return
                yield message.SerializeToString()
            largest = index

    before = daemon.rss_bytes()
    with grpc.insecure_channel(daemon.url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(METHOD)(requests(), timeout=250)
        next(call)
        last = -1
        while largest < 20 or largest != last:  # the daemon takes no more
            last = largest
            check(daemon)
        assert daemon.rss_bytes() < before + MAX_GROWTH_BYTES
        assert largest < 2000
        stops[0] = True
        call.cancel()


MESSAGES = st.one_of(
    st.builds(hello, job_id=st.sampled_from(["fuzz", ""])).map(lambda message: [message]),
    st.builds(start, num_slots=st.integers(0, 9), lookahead=st.integers(1, 5), world_size=st.integers(1, 3)),
    st.builds(lambda index, values: ids(batch_of(index, *values)), st.integers(0, 3), st.lists(st.integers(0, 9))),
    st.builds(frame, st.integers(1, 7), st.binary(max_size=80), run=st.integers(0, 2)),
    st.builds(
        lambda words: frame(BATCH, header(*words)),
        st.lists(st.integers(-2, 3) | st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=9),
    ),
    st.just(frame(END)),
).map(lambda messages: [message.SerializeToString() for message in messages])


@given(parts=st.lists(MESSAGES | st.binary(max_size=40).map(lambda data: [data]), max_size=8))
def test_any_messages_in_any_order(daemon: Daemon, parts: list[list[bytes]]) -> None:
    first = hello(job_id="fuzz").SerializeToString()
    replies, _ = say(daemon, [first, *(message for part in parts for message in part)], half_close=True)
    assert len(replies) <= 40
