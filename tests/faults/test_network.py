"""A network with delay and loss only slows a job down; a silent network ends it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import Config
from tests.faults.lossy_link import lossy_link, why_no_link
from tests.system.hosts import serve_store
from tests.system.jobs import change, run_job
from tests.system.programs import Program, await_gone
from tests.system.test_hosts import flags_of
from tests.system.writes import Writes

pytestmark = [
    pytest.mark.alone,
    pytest.mark.redis,
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(why_no_link()), reason=why_no_link() or "it can"),
]

MakeConfig = Callable[..., Config]


def far_job(config: Config, url: str, **values: object) -> list[str]:
    return flags_of(change(config, store__url=url, store__namespace=uuid.uuid4().hex, **values))


def test_a_slow_and_lossy_network_changes_no_bit(clicks: MakeConfig, tmp_path: Path) -> None:
    """A round trip of about 10 ms, and 1 % packet loss."""
    config = change(clicks("mixed", "deepfm"), cache__rows=100)
    result = tmp_path / "out.json"
    with lossy_link() as link, serve_store(link.far, tmp_path) as store:
        flags = [*far_job(config, store.url), "--result", str(result)]
        with Program(flags, host=link.near, forked=tmp_path) as program:
            done = program.finish()
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = json.loads(result.read_text())
    assert (found["dense_digest"], found["embedding_digest"]) == run_job(config).digests


def test_a_store_that_vanishes_from_the_network_ends_the_job(clicks: MakeConfig, tmp_path: Path) -> None:
    """No connection is closed: the job ends on its own deadline, not on TCP's of a quarter of an hour."""
    config, namespace = change(clicks(epochs=10_000), cache__rows=0), uuid.uuid4().hex
    with lossy_link(loss=0.0) as link, serve_store(link.far, tmp_path) as store:
        flags = flags_of(change(config, store__url=store.url, store__namespace=namespace))
        writes = Writes(store.local_url, namespace)
        with Program([*flags, "--store.timeout_s=3"], host=link.near, forked=tmp_path) as program:
            writes.wait(50)
            writes.close()
            link.drop_all()
            done = program.finish()
    assert done.code == 1
    assert "store.timeout_s = 3 s" in done.error_line
    await_gone(done.mark)
