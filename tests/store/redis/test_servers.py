"""Errors of a server's connection. Refusals of whole stores: test_store, test_tls, test_acl."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.redis.servers import Unreachable
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.redis.urls import parse_urls
from bagpipe.store.server.embedded import EmbeddedServer, installed_servers
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import await_true

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.ConnectionError("x"), Unreachable),
        (redis.TimeoutError("x"), Unreachable),
        (redis.exceptions.BusyLoadingError("x"), Unreachable),
        (OSError("x"), Unreachable),
        (redis.AuthenticationError("x"), InputError),
        (redis.InvalidResponse("x"), InputError),
        (redis.ResponseError("x"), InputError),
    ],
)
def test_only_silence_is_retried(error: Exception, kind: type) -> None:
    (server,) = parse_urls("redis://u:secret@host")
    with pytest.raises(InputError, match=r"store redis://u:\*\*\*@host: ") as caught:
        with server.refusals(1.0):
            raise error
    assert type(caught.value) is kind


@pytest.mark.redis
@pytest.mark.parametrize("binary", list(installed_servers()), ids=lambda path: path.name)
def test_a_job_starts_while_the_server_reads_its_file(binary: Path, tmp_path: Path) -> None:
    """As after a restart of the server in a pod."""
    schema, ids = RowSchema(tables=(RowTable(name="user", dim=4),), optimizer="sgd"), np.arange(100, dtype=np.int64)
    with EmbeddedServer(tmp_path, binary=binary) as server, client_of(server.url) as client:
        with RedisStore(server.url, schema=schema, namespace="n") as store:
            store.write(0, ids, np.ones((100, 4), np.float32))
        client.mset({f"other:{number}": "x" * 100 for number in range(10_000)})
        client.save()
    url = f"unix://{tmp_path}/s"
    command = [str(binary), "--port", "0", "--dir", str(tmp_path), "--unixsocket", str(tmp_path / "s")]
    slow = ["--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024"]
    with subprocess.Popen([*command, *slow], stdout=subprocess.DEVNULL) as process, client_of(url) as client:
        hurry = threading.Thread(target=load_quickly_after_a_refusal, args=(client,))
        try:
            await_true(lambda: is_loading(client), "the server")
            hurry.start()
            with RedisStore(url, schema=schema, namespace="n") as store:
                assert (store.read(0, ids).rows == 1).all()
            hurry.join()
            assert client.info("errorstats")["errorstat_LOADING"]["count"] > 0
        finally:
            process.terminate()


def is_loading(client: redis.Redis) -> bool:
    try:
        return bool(client.info("persistence")["loading"])
    except redis.ConnectionError:  # it does not listen yet
        return False


def load_quickly_after_a_refusal(client: redis.Redis) -> None:
    await_true(lambda: "errorstat_LOADING" in client.info("errorstats"), "a refusal")
    client.config_set("key-load-delay", 0)
