from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from bagpipe.files import remote
from tests.files.contents import CONTENT
from tests.files.s3_server import Proxy, s3_server, use_server


@contextmanager
def fresh_clients() -> Iterator[None]:
    """Clients that read the environment anew."""
    forget_clients()
    try:
        yield
    finally:
        forget_clients()


def forget_clients() -> None:
    """The next client reads the environment anew, and the next look decides versions."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    remote.forget("")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    use_server(s3_address, monkeypatch)
    with fresh_clients():
        system = fsspec.filesystem("s3", use_listings_cache=False)
        system.mkdir("bucket")
        yield "s3://bucket"
        system.rm("bucket", recursive=True)


@pytest.fixture
def url(bucket: str) -> str:
    """The URL of an object with `CONTENT`."""
    fsspec.filesystem("s3").pipe_file("bucket/a.bin", CONTENT)
    return f"{bucket}/a.bin"


@pytest.fixture
def proxy(bucket: str, s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The clients reach the server of `bucket` through it."""
    with Proxy(s3_address) as found:
        use_server(found.address, monkeypatch)
        with fresh_clients():
            yield found
        use_server(s3_address, monkeypatch)
