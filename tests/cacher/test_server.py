"""Listening, health checks, and shutdown of a daemon."""

from __future__ import annotations

import json
import queue
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import cacher.server
from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import PROTOCOL_VERSION, settings_of
from bagpipe.client.cacher_pb2_grpc import CacherStub
from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.rank_batch import RankBatch
from cacher.server import Limits
from tests.cacher.daemons import (
    Daemon,
    all_batches,
    assert_same_batches,
    config,
    planned_batches,
    refused_daemon,
    remote,
    served,
    spec_of,
)
from tests.effort import some_of

JOB = config()


def health(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        status: int = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=250).status
        return status


def hello(job: Config) -> pb.Hello:
    return pb.Hello(
        protocol=PROTOCOL_VERSION, job_id="job", instance="one", world_size=1, credits=1,
        settings=json.dumps(settings_of(job)),
    )  # fmt: skip


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_health_check() -> None:
    with served(JOB, "127.0.0.1:0") as server:
        assert server.address.port > 0
        assert health(server.address.target) == health_pb2.HealthCheckResponse.SERVING


def test_a_socket_is_this_user_s_alone_and_goes_with_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with served(JOB, f"unix:{path}"):
        assert path.stat().st_mode & 0o077 == 0
    assert not path.exists()


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(InputError, match=r"^--listen 127\.0\.0\.1:\d+: cannot listen there"):
            served(JOB, f"127.0.0.1:{other.getsockname()[1]}").__enter__()
    with served(JOB, "127.0.0.1:0") as server, pytest.raises(InputError, match="cannot listen there"):
        served(JOB, server.address.target).__enter__()
    listen = f"unix:{tmp_path}/c.sock"
    with served(JOB, listen), pytest.raises(InputError, match="another process listens there"):
        served(JOB, listen).__enter__()


def test_a_socket_left_behind_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with served(JOB, f"unix:{path}"):
        assert len(all_batches(f"unix:{path}", JOB)[0]) == 18


def test_a_call_that_ends_while_the_daemon_stops_ends_well(tmp_path: Path) -> None:
    """Else gRPC logs "Got goaway" in the trainer of a job that has ended well."""
    listen = f"unix:{tmp_path}/c.sock"
    requests: queue.SimpleQueue[pb.TrainerMessage | None] = queue.SimpleQueue()
    requests.put(pb.TrainerMessage(hello=hello(JOB)))
    with ExitStack() as server, ThreadPoolExecutor(1) as pool, grpc.insecure_channel(listen) as channel:
        server.enter_context(served(JOB, listen, limits=Limits(stop_grace_s=60)))
        call = CacherStub(channel).Train(iter(requests.get, None))
        assert next(call).WhichOneof("kind") == "welcome"
        stopped = pool.submit(server.close)
        while is_listening(tmp_path / "c.sock"):
            assert not stopped.done()
        requests.put(pb.TrainerMessage(leave=pb.Leave()))
        requests.put(None)
        assert list(call) == []
        assert call.code() is grpc.StatusCode.OK
        stopped.result()


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with Daemon(JOB, f"unix:{tmp_path}/c.sock") as daemon:
        assert daemon.end(number) == 0
        assert not (tmp_path / "c.sock").exists()


@pytest.mark.multiproc
def test_a_drain_lets_jobs_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    draining, reported = threading.Event(), threading.Event()

    def take(rank: int, rank_batches: Iterator[RankBatch]) -> list[RankBatch]:
        first = next(rank_batches)
        reported.set()
        assert draining.wait(30)
        return [first, *rank_batches]

    with Daemon(JOB, f"unix:{tmp_path}/c.sock") as daemon, ThreadPoolExecutor(1) as pool:
        running = pool.submit(all_batches, daemon.url, JOB, take=take)
        assert reported.wait(30)
        daemon.process.send_signal(signal.SIGTERM)
        while health(daemon.url) == health_pb2.HealthCheckResponse.SERVING:
            pass
        with pytest.raises(JobError, match="shutting down and takes no new jobs"):
            all_batches(daemon.url, JOB, job_id="late")
        draining.set()
        assert_same_batches(running.result()[0], planned_batches(JOB)[0])
        assert daemon.process.wait(30) == 0
        assert "drained" in daemon.events()


@pytest.mark.multiproc
@pytest.mark.parametrize(("flags", "signals"), [(("--drain-timeout-s", "0.3"), 1), ((), 2)])
def test_a_drain_has_an_end(tmp_path: Path, flags: tuple[str, ...], signals: int) -> None:
    """A drain ends after its timeout, or at the second signal."""
    job = config(timeout_s=0.3)
    with Daemon(job, f"unix:{tmp_path}/c.sock", *flags) as daemon, remote(daemon.url, job):
        for _ in range(signals):
            daemon.process.send_signal(signal.SIGTERM)
            while (
                daemon.process.poll() is None and health_or_gone(daemon.url) == health_pb2.HealthCheckResponse.SERVING
            ):
                pass
        assert daemon.process.wait(30) == 0


def health_or_gone(target: str) -> int:
    try:
        return health(target)
    except grpc.RpcError:
        return health_pb2.HealthCheckResponse.UNKNOWN


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("flags", "message"),
    some_of(
        [
            ((), "--listen is needed"),
            (("--listen", "nowhere"), "--listen must be unix:PATH"),
            (("--listen", "unix:/no/such/folder/c.sock"), "the folder /no/such/folder does not exist; make it first"),
            (("--listen", "127.0.0.1:0", "--max-jobs", "1.5"), "--max-jobs must be a number above 0, got '1.5'"),
            (("--listen", "127.0.0.1:0", "--grace-s", "soon"), "--grace-s must be a number above 0, got 'soon'"),
            (("--listen", "127.0.0.1:0", "--log-level", "loud"), "--log-level must be one of"),
            (("--listen", "127.0.0.1:0", "--log-to", "file"), "--log-to must be one of stderr, stdout"),
            (("--listen", "127.0.0.1:0", "--secret-file", "/no/such"), "--secret-file /no/such: No such file"),
            (("--listen", "127.0.0.1:0", "--metrics", "203.0.113.1:1"), "--metrics: cannot listen at 203.0.113.1:1: "),
            (("--listen", "127.0.0.1:0", "--data.format", "parquet", "--data.path", "/no/such"), "/no/such"),
            (("--listen", "127.0.0.1:0", "--data.no", "1"), "unknown option --data.no"),
        ],
        {0, 3, 7, 9},
    ),
)
def test_startup_errors_are_one_line(flags: tuple[str, ...], message: str) -> None:
    code, said = refused_daemon(*flags)
    assert code == 2, said
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_connections_leave_file_descriptors_to_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections beyond the limit are closed at once, and a job under way does not notice; later ones find
    room when the silent ones' time is over.
    """
    monkeypatch.setattr(cacher.server, "_MAX_CONNECTIONS", 20)
    with served(JOB, "127.0.0.1:0", limits=Limits(hello_timeout_s=5.0)) as server, ExitStack() as stack:
        url, [expected] = str(server.address), planned_batches(JOB)
        source = stack.enter_context(remote(url, JOB))
        batches = source.batches("train", spec_of(JOB, source.schema))
        taken = [next(batches)]
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", server.address.port))) for _ in range(60)]
        closed = 0
        for connection in reversed(opened):  # the later ones are refused
            connection.settimeout(60)
            if closed < 41:
                assert connection.recv(1) == b"", "closed without a byte"
                closed += 1
        assert_same_batches([*taken, *batches], expected)
        assert_same_batches(all_batches(url, JOB, job_id="later")[0], expected)


@pytest.mark.parametrize(
    ("descriptors", "connections", "rings"),
    [(1024, 384, 128), (20_000, 19_232, 256), (100, 38, 12), (resource.RLIM_INFINITY, 1 << 20, 256)],
)
def test_connections_and_rings_leave_file_descriptors(
    descriptors: int, connections: int, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert cacher.server.descriptor_shares() == (connections, rings)
