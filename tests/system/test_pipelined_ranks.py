"""Stages in separate processes give the bits of the same stages in one process, for any cache; also under torchrun.

Digests of one pipe equal those of one process. If two ranks read examples (chimera), digests equal direct mode's on the
same ranks, and numbers equal one process's.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_lines, real_samples
from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.programs import await_gone, torchrun
from tests.system.staging import run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import digests_of, run_processes, run_to_the_end

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

#: Schedule and ranks.
PLACES = [("graph", 4), ("dualpipe-v", 2)]


def in_processes(config: Config, server: EmbeddedServer, world_size: int, **values: object) -> tuple[str, str]:
    namespace = uuid.uuid4().hex
    config = change(config, store__url=server.url, store__namespace=namespace, **values)
    return digests_of(run_to_the_end(config, world_size))


@pytest.mark.parametrize(("schedule", "num_ranks"), PLACES)
def test_a_process_per_rank(clicks: MakeConfig, redis_server: EmbeddedServer, schedule: str, num_ranks: int) -> None:
    config = staged(clicks("mixed", "deepfm", limit=150, eval_fraction=0.1), schedule, num_ranks)
    rows = -(-largest_batch(config) // num_ranks)
    there = in_processes(config, redis_server, num_ranks, cache__rows=rows, oracle__lookahead=4)
    assert there == run_staged(change(config, cache__rows=0)).digests


def test_dropout_is_the_same_in_processes(clicks: MakeConfig, redis_server: EmbeddedServer) -> None:
    config = change(clicks(limit=100), model__factory="tests.system.staged_models:dropping", cache__rows=200)
    config = staged(config, "zb-v", 2)
    assert in_processes(config, redis_server, 2) == run_staged(config).digests


@pytest.mark.parametrize(("schedule", "num_ranks"), some_of([("pipeoptim", 2), ("spectrain-v2", 4)], {0}))
def test_rows_that_are_read_a_batch_late(
    clicks: MakeConfig, redis_server: EmbeddedServer, schedule: str, num_ranks: int
) -> None:
    config = staged(clicks("mixed", "deepfm", limit=150), schedule, num_ranks, pipeline__rows_delay=1)
    rows = -(-2 * largest_batch(config) // num_ranks)
    there = in_processes(config, redis_server, num_ranks, cache__rows=rows, oracle__lookahead=4)
    assert there == run_staged(change(config, cache__rows=0)).digests


def test_replicas_and_a_daemon(clicks: MakeConfig, redis_server: EmbeddedServer, tmp_path: Path) -> None:
    """Two replicas of two stages, with a separate cacher daemon."""
    config = staged(clicks("mean", "dcnv2", "adam", limit=100), "1f1b", 2, pipeline__recompute=True)
    here = run_staged(change(config, cache__rows=0, pipeline__recompute=False), 4)
    rows = -(-largest_batch(config) // 4)
    config = change(config, store__url=redis_server.url, store__namespace=uuid.uuid4().hex, cache__rows=rows)
    assert digests_of(run_processes(config, 4, tmp_path)) == here.digests


# ---- click logs as they come -----------------------------------------------------------------------------------------

MODEL = ["--model.embedding_dim", "4", "--model.bottom_mlp", "16,8", "--model.top_mlp", "16", "--data.workers", "0"]


def log_config(path: Path, *flags: str) -> Config:
    data = ["--data.format", "criteo-tsv", "--data.path", str(path), "--data.eval_fraction", "0.1"]
    return change(parse_config([*data, *MODEL, *flags], "test").config, store__url="memory://")


def check_log(config: Config, server: EmbeddedServer, schedule: str) -> None:
    """Two ranks with a cache give direct mode's bits and the whole model's numbers."""
    whole = run_job(change(config, cache__rows=0))
    config = staged(config, schedule, 2)
    rows = -(-largest_batch(config) // 2) + 100
    namespace = uuid.uuid4().hex
    placed = change(config, store__url=server.url, store__namespace=namespace, cache__rows=rows)
    results = run_to_the_end(placed, 2)
    if DENSE_SCHEDULES[schedule].num_pipes == 1:
        assert digests_of(results) == run_staged(change(config, cache__rows=0)).digests
    else:
        assert digests_of(results) == in_processes(config, server, 2, cache__rows=0)
    progress = whole.trained.progress
    assert results[0]["loss"] == pytest.approx(float(progress.loss_sum) / progress.samples, rel=1e-4)
    assert results[0]["auc"] == pytest.approx(whole.auc, abs=1e-3)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    path.write_bytes(criteo_lines(800))
    return path


@pytest.mark.parametrize("schedule", some_of(["1f1b", "chimera", "graph", "zb-h1"], {1}))
def test_a_click_log(log: Path, redis_server: EmbeddedServer, schedule: str) -> None:
    check_log(log_config(log, "--data.batch_size", "128"), redis_server, schedule)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "graph", "chimera", "zb-h1"])
@pytest.mark.parametrize("path", real_samples(), ids=lambda path: path.name)
def test_the_real_sample(path: Path, redis_server: EmbeddedServer, schedule: str) -> None:
    check_log(log_config(path, "--data.batch_size", "1024", "--optim.rows_lr", "0.02"), redis_server, schedule)


@pytest.mark.parametrize(("schedule", "ranks"), [("zb-h1", 2), pytest.param("chimera", 4, marks=pytest.mark.slow)])
def test_torchrun(schedule: str, ranks: int, log: Path, redis_server: EmbeddedServer, tmp_path: Path) -> None:
    """The command line of the documentation. The second job has two replicas of two stages."""
    result, namespace = tmp_path / "out.json", uuid.uuid4().hex
    flags = ["--pipeline.schedule", schedule, "--pipeline.stages", "2", "--pipeline.microbatches", "8"]
    flags += ["--data.path", str(log), "--data.format", "criteo-tsv", "--data.batch_size", "128", *MODEL]
    flags += ["--store.url", redis_server.url, "--store.namespace", namespace]
    flags_of_ranks = [*flags, "--cache.rows", "5000", "--result", str(result)]
    with torchrun(flags_of_ranks, ranks=ranks, forked=tmp_path) as program:
        done = program.finish()
    assert (done.code, done.err) == (0, "")
    await_gone(done.mark)
    found = json.loads(result.read_text())
    config = parse_config(flags, "test").config
    there = run_staged(change(config, cache__rows=0, store__url="memory://"), 1 if ranks == 2 else ranks)
    assert (found["dense_digest"], found["embedding_digest"]) == there.digests
