"""Clocks that jump: a job, its store and its cacher see the wall clock leap to and fro, and nothing comes of it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.harness.clock import ClockJump, find_compiler
from tests.store.nodes import await_true
from tests.system.jobs import run_job
from tests.system.programs import Program, await_gone
from tests.system.test_torchrun import JOB
from tests.system.writes import Writes, client_of

pytestmark = [
    pytest.mark.redis,
    pytest.mark.multiproc,
    pytest.mark.skipif(find_compiler() is None, reason="the clock is compiled, and there is no compiler"),
]

DAY_S = 86_400
FLAGS = [*JOB, "--data.epochs", "8", "--data.eval_fraction", "0"]


def test_a_jumping_clock_changes_nothing(tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "out.json"
    with ClockJump(tmp_path) as clock, ExitStack() as stack:
        with monkeypatch.context() as patch:
            for name, value in clock.environment.items():
                patch.setenv(name, value)
            server = stack.enter_context(EmbeddedServer(tmp_path / "server"))
        with client_of(server.url) as client:
            client.config_set("notify-keyspace-events", "Kh")
            before_s = client.time()[0]
            clock.jump(DAY_S)
            await_true(lambda: client.time()[0] >= before_s + DAY_S, "the jump")  # the server caches the time
            clock.jump(0)
        flags = [*FLAGS, "--store.url", server.url, "--store.namespace", namespace]
        writes = Writes(server.url, namespace)
        with Program([*flags, "--result", str(result)], clock.environment) as program:
            for offset_s in (DAY_S, -DAY_S, 0, -365 * DAY_S):
                writes.wait(200)
                clock.jump(offset_s)
            assert program.process is not None
            assert program.process.poll() is None, "the job ended before the clock had jumped"
            done = program.finish()
        writes.close()
    assert (done.code, done.err) == (0, "")
    await_gone(done.mark)
    found = json.loads(result.read_text())
    again = run_job(parse_config([*FLAGS, "--store.url", "memory://"], "test").config)
    assert (found["dense_digest"], found["embedding_digest"]) == again.digests
