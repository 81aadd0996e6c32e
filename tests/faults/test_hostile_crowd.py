"""A daemon under a thousand hostile connections serves a real training job, with the digests of an undisturbed one."""

from __future__ import annotations

import json
import resource
import socket
import struct
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bagpipe.client.agreement import SECRET_METADATA, settings_of
from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from tests.cacher.daemons import Daemon
from tests.cacher.test_hostile_peers import (
    GOOD_START,
    HEADERS,
    PREFACE,
    SETTINGS,
    dialogue,
    frame,
    hello,
    literal,
)
from tests.system.programs import run_forked

NUM_CONNECTIONS = 1000

pytestmark = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.skipif(
        resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * NUM_CONNECTIONS + 1000, reason="too few file descriptors"
    ),
]

SECRET = "a secret of some length"


def call_with(secret: str, *payloads: bytes) -> bytes:
    headers = frame(1, 4, 1, HEADERS[9:] + literal(SECRET_METADATA, secret))
    data = [frame(0, 0, 1, b"\x00" + struct.pack(">I", len(payload)) + payload) for payload in payloads]
    return b"".join([PREFACE, SETTINGS, headers, *data])


JOB = [
    "--data.format", "synthetic", "--data.limit", "2000", "--data.batch_size", "100", "--data.workers", "0",
    "--model.embedding_dim", "4", "--model.bottom_mlp", "6", "--model.top_mlp", "5", "--cache.rows", "20000",
    "--store.url", "memory://",
]  # fmt: skip

#: What a hostile connection sends first; it stays open. A job that asks for nothing is the ninth.
OPENINGS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)),
    PREFACE[:9],
    PREFACE + SETTINGS,
    GOOD_START,  # a call without the secret, and silent
    dialogue(hello(job_id="idle").SerializeToString()),  # without the secret
    call_with("a wrong secret of some length", hello(job_id="idle").SerializeToString()),
    call_with(SECRET),
)


def opening(number: int, job: Config) -> bytes:
    kind = number % (len(OPENINGS) + 1)
    if kind < len(OPENINGS):
        return OPENINGS[kind]
    # With the secret and the right settings it is a job, which then asks for nothing.
    idle = hello(job_id=f"idle-{number}", settings=json.dumps(settings_of(job)))
    return call_with(SECRET, idle.SerializeToString())


def test_a_training_job_amid_hostile_connections(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    known = ["--cacher.secret_file", str(secret)]

    def digests(name: str, *flags: str) -> tuple[str, str]:
        result = tmp_path / name
        done = run_forked([*JOB, *flags, "--result", str(result)], tmp_path)
        assert (done.code, done.err) == (0, "")
        found = json.loads(result.read_text())
        return found["dense_digest"], found["embedding_digest"]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = digests("alone.json")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the daemon inherits it
    try:
        job = parse_config(JOB, "test").config
        flags = ("--secret-file", str(secret), "--max-jobs", "500")
        with Daemon(job, "127.0.0.1:0", *flags) as daemon, ExitStack() as stack:
            host, _, port = daemon.url.rpartition(":")
            for number in range(NUM_CONNECTIONS):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
                with suppress(OSError):
                    connection.sendall(opening(number, job))
                    if number % 2:
                        connection.shutdown(socket.SHUT_WR)  # half open
            assert digests("amid.json", "--cacher.url", daemon.url, *known) == expected
            stack.close()
            assert digests("after.json", "--cacher.url", daemon.url, *known) == expected
            assert daemon.process.poll() is None
            assert not [line for line in daemon.logs if "traceback" in line]
            counts = Counter(line["event"] for line in daemon.logs)
            # Of 333, and of 111 of which half are half open: those whose first bytes were read before they ended.
            assert counts["unauthenticated"] > 200
            assert counts["job started"] > 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
