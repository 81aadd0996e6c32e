"""The commands in the examples' README work, with less data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.load import parse_config
from tests.system.hosts import serve_store, two_hosts, why_no_hosts
from tests.system.jobs import change
from tests.system.programs import ROOT, run_forked, without_advice
from tests.system.test_ranks import digests_of, run_to_the_end

#: Warnings of torch.distributed, some with C++ frames.
TORCH_SAYS = re.compile(
    r"\[W\d{4} .*\[c10d\]|W\d{4} .*rendezvous|Exception raised from |frame #|<omitting python frames>|$"
)

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

EXAMPLES = ROOT / "examples"
LESS = ["--data.limit", "1000", "--data.batch_size", "100", "--data.workers", "0", "--cache.rows", "2000"]


@contextmanager
def script(command: Sequence[str | Path], **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    """Standard output. Asserts that stderr is empty except for torch's warnings about names and an early launcher
    exit.
    """
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert not [line for line in without_advice(err).splitlines() if not TORCH_SAYS.match(line)], err
    return out


def expected(arguments: list[str], url: str) -> tuple[str, str]:
    """Direct mode's digests on two ranks of one machine."""
    config = change(parse_config(arguments, "test").config, cache__rows=0, store__url=url)
    return digests_of(run_to_the_end(change(config, store__namespace=uuid.uuid4().hex), 2))


def found(path: Path) -> tuple[str, str]:
    result = json.loads(path.read_text())
    return result["dense_digest"], result["embedding_digest"]


def test_two_ranks(tmp_path: Path, redis_server: Any) -> None:
    """Rank 0 alone prints, writes the result and draws; every rank traces."""
    result, trace, boards = tmp_path / "out.json", tmp_path / "trace.json", tmp_path / "boards"
    files = ["--result", result, "--run.trace", trace, "--run.tensorboard", boards]
    with script([EXAMPLES / "two_ranks.sh", *LESS, *files]) as process:
        assert finish(process).count("embedding digest") == 1
    for path in (trace, tmp_path / "trace.rank1.json"):
        names = {event["args"].get("name") for event in json.loads(path.read_text())["traceEvents"] if "args" in event}
        assert {"pull", "push", "ack"} <= names, names
    assert len(list(boards.iterdir())) == 1
    config = ["--config", str(ROOT / "trainer/configs/synthetic.toml"), *LESS]
    assert found(result) == expected(config, redis_server.url)


def test_own_model(tmp_path: Path) -> None:
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) < 40
    config = str(ROOT / "trainer/configs/synthetic.toml")
    done = run_forked(["--config", config, "--model.factory", "examples.own_model:build", *LESS], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "AUC" in done.out


@pytest.mark.alone
@pytest.mark.slow  # six fresh interpreters; `test_hosts` has such jobs in forked ones
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "it can")
def test_two_hosts(tmp_path: Path, redis_server: Any) -> None:
    """A daemon and a store that both nodes reach over the network give the same bits as one host."""
    secret, result = tmp_path / "secret.txt", tmp_path / "out.json"
    secret.write_text("correct horse battery staple\n")
    secret.chmod(0o600)
    folder = EXAMPLES / "two_hosts"
    with two_hosts() as hosts, serve_store(hosts[0], tmp_path) as store:
        address = f"{hosts[0].address}:7077"
        environment = {"SECRET": str(secret), "HEAD": hosts[0].name, "JOB": uuid.uuid4().hex}
        daemon = [*hosts[0].prefix, folder / "cacher.sh", address, *LESS]
        node = [folder / "node.sh", "--cacher.url", address, "--store.url", store.url, *LESS, "--result", result]
        with (
            script(daemon, **environment) as cacher,
            script([*hosts[0].prefix, *node], **environment) as first,
            script([*hosts[1].prefix, *node], **environment) as second,
        ):
            assert "AUC" in finish(first) + finish(second)
            cacher.terminate()
            assert cacher.wait(30) == 0
    assert found(result) == expected(["--config", str(folder / "job.toml"), *LESS], redis_server.url)
