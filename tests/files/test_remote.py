from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from bagpipe.errors import InputError
from bagpipe.files import remote
from bagpipe.files.access import file_version, open_file
from bagpipe.files.remote import RemoteObject, kind_of, object_at, retried
from bagpipe.files.transfer import get_bytes
from tests.files.contents import CONTENT, memory
from tests.files.s3_server import Proxy


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of a millisecond."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)


@contextmanager
def http_server(status: int, headers: dict[str, str]) -> Iterator[str]:
    """The URL of three bytes on a server that gives these headers, which a test may change."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": "3", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(b"abc")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/a.bin"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_faults_cost_time_alone(url: str, proxy: Proxy, quick: None) -> None:
    faults = ["500", "cut", "slow", ""]
    proxy.faults = lambda number, method, path: faults[number % 4] if method == "GET" else ""
    with open_file(url) as stream:
        assert stream.read() == CONTENT
    for start in range(0, 1_500_000, 300_000):
        assert object_at(url).read_range(start, start + 10) == CONTENT[start : start + 10]
    assert {"500", "cut", "slow"} <= set(proxy.injected)


def test_a_store_that_never_answers_well_is_an_error(
    url: str, proxy: Proxy, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 2)  # the client has some of its own
    found = object_at(url)
    proxy.faults = lambda number, method, path: "cut"
    with pytest.raises(OSError, match=r"\(2 attempts\)"):
        found.read_range(0, 100)


def test_a_changed_object_is_refused_with_both_etags(url: str) -> None:
    with open_file(url) as stream:
        before = file_version(url)
        stream.read(10)
        fsspec.filesystem("s3").pipe_file("bucket/a.bin", CONTENT[::-1])
        stream.seek(1_000_000)
        with pytest.raises(InputError) as caught:
            stream.read(10)
    remote.forget(url)
    after = file_version(url)
    assert before.tag != after.tag
    assert str(caught.value) == f"{url} changed while it was read: it had {before}, and has {after}"


def test_a_version_of_another_process_is_kept(url: str) -> None:
    seen = file_version(url)
    fsspec.filesystem("s3").pipe_file("bucket/a.bin", b"new")
    remote.forget(url)
    remote.pin({url: seen})
    with pytest.raises(InputError, match="changed while it was read"):
        open_file(url)


def test_a_changed_object_of_a_store_without_conditions_is_refused() -> None:
    source = RemoteObject(memory("changing", b"before"))
    memory("changing", b"later!")
    with pytest.raises(InputError, match="changed while it was read: it had 6 bytes, etag"):
        source.read_range(0, 3)


@pytest.mark.parametrize("name", ["ETag", "Content-MD5", "Digest", "Last-Modified"])
def test_a_changed_object_of_a_web_server_is_refused(name: str) -> None:
    headers = {name: "one"}
    with http_server(200, headers) as url:
        source = RemoteObject(url)
        assert source.read_range(0, 3) == b"abc"
        headers[name] = "two"
        with pytest.raises(InputError, match="it had 3 bytes, etag one, and has 3 bytes, etag two"):
            source.read_range(0, 3)


def test_a_server_that_tells_no_version_is_refused() -> None:
    with http_server(200, {}) as url, pytest.raises(InputError) as refused:
        RemoteObject(url)
    assert str(refused.value) == f"{url}: the server does not tell the version of the file: copy the file"


@pytest.mark.parametrize("status", [404, 410])
def test_a_web_server_without_the_file_is_asked_once(status: int, quick: None) -> None:
    with http_server(status, {}) as url:
        with pytest.raises(FileNotFoundError):
            RemoteObject(url)
        assert kind_of(url) == ""


def test_a_web_server_without_the_file_in_a_read(quick: None) -> None:
    with http_server(404, {}) as url, pytest.raises(FileNotFoundError):
        get_bytes(url)


def test_an_unreachable_web_server_is_not_a_missing_file(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 3)
    with http_server(200, {}) as url:
        pass
    with pytest.raises(OSError, match=r"Cannot connect to host .* \(3 attempts\)") as caught:
        kind_of(url)
    assert not isinstance(caught.value, FileNotFoundError)


def test_a_web_server_that_starts_late_costs_time_alone(quick: None) -> None:
    with http_server(200, {"ETag": "one"}) as url:
        calls = []

        def late() -> str:
            calls.append(1)
            if len(calls) < 3:
                try:
                    raise ConnectionRefusedError("not yet")
                except OSError as error:
                    raise FileNotFoundError(url) from error
            return RemoteObject(url).version.tag

        assert retried(url, late) == "one"


def test_no_object_no_package_no_scheme(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(f"{bucket}/none")
    with pytest.raises(InputError, match=r"^nonsense://a: .*nonsense"):
        open_file("nonsense://a")
    with pytest.raises(InputError, match=r"^https://host/a: its user and password stood in the path"):
        open_file("https://user:secret@host/a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"^gs://a/b: gs:// needs a Python package that is not installed: .*gcsfs"):
        open_file("gs://a/b")


@pytest.mark.multiproc
def test_without_credentials_there_is_one_line(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    code = ["-m", "data", "convert", url, str(tmp_path / "out.parquet")]
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        f"error: {url}: no access: Unable to locate credentials; credentials come by the rules"
    )
    assert done.stderr.count("\n") == 1


def test_a_refused_call_is_not_tried_again() -> None:
    calls = []

    def refused() -> None:
        calls.append(1)
        raise PermissionError("403")

    with pytest.raises(InputError, match=r"s3://b/c: no access: 403; credentials come by"):
        retried("s3://b/c", refused)
    assert len(calls) == 1
