"""Jobs over two hosts: torchrun on each; store and cacher are reached over the network."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import Config
from tests.system.hosts import Host, serve_store, two_hosts, why_no_hosts
from tests.system.jobs import change
from tests.system.programs import Done, Program, await_end, await_gone, ranks_of
from tests.system.test_ranks import digests_of, run_to_the_end
from tests.system.writes import Writes

pytestmark = [
    pytest.mark.alone,
    pytest.mark.redis,
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "it can"),
]

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def store_url(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_store(hosts[0], tmp_path_factory.mktemp("store")) as store:
        yield store.url


def flags_of(config: Config, **values: object) -> list[str]:
    """Command-line flags of the test configuration."""
    config = change(config, **values)
    keys = {
        "data": ("path", "format", "schema", "batch_size", "eval_fraction", "epochs"),
        "cache": ("rows",),
        "store": ("url", "namespace", "buckets"),
        "cacher": ("url", "assign"),
        "model": ("name", "embedding_dim", "bottom_mlp", "top_mlp", "factory"),
        "optim": ("rows", "rows_lr", "dense_lr", "eps"),
        "run": ("peer_timeout_s",),
    }
    flags = []
    for section, names in keys.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"--{section}.{name}={text}")
    return flags


class Job:
    """torchrun on both hosts. Context manager."""

    def __init__(self, hosts: tuple[Host, Host], arguments: list[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29500", f"--rdzv-id={self.mark}"]
        self.programs = [
            Program(
                ["--nnodes=2", "--nproc-per-node=1", *rendezvous, "-m", "trainer", *arguments],
                module="torch.distributed.run",
                host=host,
                forked=folder,
                mark=self.mark,
            )
            for host in hosts
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Job:
        for program in self.programs:
            self._stack.enter_context(program)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(self) -> list[Done]:
        ended = [program.finish() for program in self.programs]
        await_gone(self.mark)
        return ended


def own_lines(done: Done) -> list[str]:
    """Lines on stderr, without those of torch's c10d about addresses that no name server knows."""
    return [line for line in done.err.splitlines() if "[c10d] The hostname of the client socket" not in line]


def error_lines(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("error:")]


def test_two_hosts_equal_one_host(
    hosts: tuple[Host, Host], store_url: str, clicks: MakeConfig, redis_server: Any, tmp_path: Path
) -> None:
    """Rank 0 starts a cacher that the other host reaches with a secret."""
    config = change(clicks("everything", "factory", eval_fraction=0.1), cache__rows=100)
    result = tmp_path / "out.json"
    arguments = flags_of(config, store__url=store_url, store__namespace=uuid.uuid4().hex)
    with Job(hosts, [*arguments, "--result", str(result)], tmp_path) as job:
        ended = job.finish()
    assert [(done.code, own_lines(done)) for done in ended] == [(0, [])] * 2
    assert sum("AUC" in done.out for done in ended) == 1
    found = json.loads(result.read_text())
    one_host = change(config, store__url=redis_server.url, store__namespace=uuid.uuid4().hex)
    expected = digests_of(run_to_the_end(one_host, 2))
    assert (found["dense_digest"], found["embedding_digest"]) == expected


def test_a_rank_s_error_ends_the_job_on_both_hosts(
    hosts: tuple[Host, Host], store_url: str, clicks: MakeConfig, tmp_path: Path
) -> None:
    config = change(clicks("everything", "factory"), model__factory="tests.system.factory:refuses", cache__rows=100)
    arguments = flags_of(config, store__url=store_url, store__namespace=uuid.uuid4().hex)
    with Job(hosts, arguments, tmp_path) as job:
        ended = job.finish()
    lines = [error_lines(done) for done in ended]
    assert lines == [["error: rank 1: the third batch is not to our taste"], []], "the first host has rank 0"
    for done in ended:
        assert done.code == 1
        assert "exitcode  : 2" in done.err


def test_a_cut_link_ends_the_job_on_both_hosts(clicks: MakeConfig, tmp_path: Path) -> None:
    """No connection is closed, packets just stop: each side ends on its own deadline."""
    with two_hosts() as hosts, serve_store(hosts[0], tmp_path) as store:
        namespace = uuid.uuid4().hex
        config = change(clicks(epochs=10_000), cache__rows=0, store__namespace=namespace)
        arguments = flags_of(config, store__url=store.url, run__peer_timeout_s=4.0)
        writes = Writes(store.local_url, namespace)
        with Job(hosts, [*arguments, "--store.timeout_s=3", "--cacher.timeout_s=20"], tmp_path) as job:
            writes.wait(100)
            writes.close()
            hosts[1].cut_link()
            await_end([pid for program in job.programs for pid in ranks_of(program)])
            # torchrun on the host without the rendezvous waits for the TCP timeout, a quarter of an hour.
            for program in job.programs:
                assert program.process is not None
                program.process.kill()
            here, there = (error_lines(program.finish()) for program in job.programs)
        await_gone(job.mark)
    assert len(here) == len(there) == 1
    assert "lost rank 1, dead or stopped" in here[0]
    assert "lost the job's key-value store, and with it rank 0 or its launcher" in there[0]
