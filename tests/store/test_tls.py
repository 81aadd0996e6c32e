"""rediss:// with a TLS server, if the installed server supports TLS, and with a server behind a TLS proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.store_conformance import CHECKS
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import start_cluster, start_server
from tests.store.tls import Authority, serves_tls, start_tls_server, tls_options

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=64),), optimizer="sgd")
IDS = np.arange(20_000, dtype=np.int64)
ROWS = np.random.default_rng(0).random((20_000, 64), np.float32)

WITHOUT_TLS = "the installed server was built without TLS: `apt install redis-server` has one with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """A TLS server, its certificate authority, and an unrelated authority."""

    server: EmbeddedServer
    port: int
    authority: Authority
    stranger: Authority

    def url(self, authority: Authority | None, *, scheme: str = "rediss", login: str = "") -> str:
        option = f"?ssl_ca_certs={authority.certificate}" if authority else ""
        return f"{scheme}://{login}127.0.0.1:{self.port}{option}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def is_native(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether the installed server supports TLS."""
    return serves_tls(tmp_path_factory.mktemp("probe"), authority.issue("probe"))


@pytest.fixture(params=["server", "front"])
def secured(
    request: pytest.FixtureRequest, authority: Authority, stranger: Authority, is_native: bool, tmp_path: Path
) -> Iterator[Secured]:
    if request.param == "server" and not is_native:
        pytest.skip(WITHOUT_TLS)
    with start_tls_server(tmp_path, authority.issue("good"), is_native=request.param == "server") as (server, port):
        yield Secured(server=server, port=port, authority=authority, stranger=stranger)


def refused(url: str, *words: str, timeout_s: float = 10.0) -> None:
    with pytest.raises(InputError) as caught, RedisStore(url, schema=SCHEMA, timeout_s=timeout_s):
        pass
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    assert not [word for word in words if word not in message], message


def test_rows_come_back_bit_for_bit(secured: Secured, namespace: str) -> None:
    """Many TLS records in both directions."""
    with RedisStore(secured.url(secured.authority), schema=SCHEMA, namespace=namespace) as store:
        assert store.claim()
        for _ in range(3):
            store.write(0, IDS, ROWS)
            assert (store.read(0, IDS).rows == ROWS).all()
        assert (store.ids(0) == IDS).all()


def test_conformance(secured: Secured) -> None:
    url = secured.url(secured.authority)
    # Opening takes several handshakes, so only the checks that concern the bytes on the wire.
    names = ("large_batch", "look_like_the_protocol", "missing_rows", "many_tables", "one_thread_reads")
    chosen = [check for check in CHECKS if any(name in check.__name__ for name in names)]
    assert len(chosen) == len(names) + 2  # missing rows are read and deleted, another thread writes or deletes
    for check in chosen:
        check(lambda schema, namespace: RedisStore(url, schema=schema, namespace=namespace))


def test_another_authority(secured: Secured) -> None:
    url = secured.url(secured.stranger, login="user:secret@")
    refused(url, f"store rediss://user:***@127.0.0.1:{secured.port}", "certificate is refused", "ssl_ca_certs")


def test_no_authority(secured: Secured) -> None:
    refused(secured.url(None), "certificate is refused: unable to get local issuer certificate", "ssl_ca_certs")


def test_plain_to_a_tls_port(secured: Secured) -> None:
    refused(secured.url(None, scheme="redis", login=":secret@"), "cannot be reached", "the URL begins with rediss")


def test_a_wrong_password_over_tls(secured: Secured) -> None:
    with client_of(secured.server.url) as client:
        client.config_set("requirepass", "right")
        try:
            refused(secured.url(secured.authority, login=":secret@"), "user or password refused")
            with RedisStore(secured.url(secured.authority, login=":right@"), schema=SCHEMA):
                pass
        finally:
            client.config_set("requirepass", "")


def test_a_certificate_that_has_expired(authority: Authority, is_native: bool, tmp_path: Path) -> None:
    expired = authority.issue("expired", is_expired=True)
    with start_tls_server(tmp_path, expired, is_native=is_native) as (_, port):
        refused(
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.certificate}", "its certificate is refused: ", "expired"
        )


def test_tls_to_a_plain_port(authority: Authority, tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, (port,), _ = start_server(stack, tmp_path, ("port",), {})
        url = f"rediss://user:secret@127.0.0.1:{port}?ssl_ca_certs={authority.certificate}"
        refused(url, "does the server speak TLS on this port?", timeout_s=1.0)


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    refused(f"rediss://127.0.0.1:1?ssl_ca_certs={path}", "store rediss://127.0.0.1:1", timeout_s=1.0)


def test_a_server_that_goes_away(authority: Authority, is_native: bool, tmp_path: Path) -> None:
    with start_tls_server(tmp_path, authority.issue("gone"), is_native=is_native) as (server, port):
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.certificate}"
        with RedisStore(url, schema=SCHEMA, timeout_s=10.0) as store:
            store.write(0, IDS, ROWS)
            server.__exit__(None, None, None)
            with pytest.raises(StoreError, match=f"rediss://127.0.0.1:{port}"):
                store.read(0, IDS)


def test_a_cluster_over_tls(authority: Authority, is_native: bool, tmp_path: Path, namespace: str) -> None:
    """The cluster reports the addresses of its nodes; user and certificates come from the URL."""
    if not is_native:
        pytest.skip(WITHOUT_TLS)
    options = tls_options(authority.issue("node")) | {
        "tls-ca-cert-file": str(authority.certificate),
        "tls-cluster": "yes",
    }
    with start_cluster(tmp_path, port_option="tls-port", options=options) as nodes:
        url = f"rediss+cluster://127.0.0.1:{nodes.masters[1].port}?ssl_ca_certs={authority.certificate}"
        with RedisStore(url, schema=SCHEMA, namespace=namespace) as store:
            assert store.claim()
            store.write(0, IDS, ROWS)
            assert (store.read(0, IDS).rows == ROWS).all()
        refused(url.partition("?")[0], "rediss+cluster://127.0.0.1", "certificate is refused")
