"""A launcher without restarts left prints an error, ends every process, and leaves the store intact."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.system.clicks import write_clicks, write_schemas
from tests.system.programs import await_gone, run_forked, torchrun

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


def test_a_launcher_without_restarts_left(redis_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    """Rank 1 fails at its third batch, and no restart is allowed."""
    clicks, schemas = write_clicks(tmp_path / "clicks.parquet", num_examples=100), write_schemas(tmp_path)
    data = ["--data.path", str(clicks), "--data.format", "parquet", "--data.schema", str(schemas["everything"])]
    sizes = ["--data.batch_size", "12", "--cache.rows", "200", "--model.embedding_dim", "4"]
    flags = [*data, *sizes, "--store.url", redis_server.url, "--store.namespace", namespace]
    refusing = [*flags, "--model.factory", "tests.system.factory:refuses"]
    with torchrun(refusing, "--max-restarts=0", forked=tmp_path) as program:
        failed = program.finish()
    assert failed.code == 1
    await_gone(failed.mark)
    assert len([line for line in failed.err.splitlines() if line.startswith("error:")]) == 1, failed.err
    done = run_forked([*flags, "--model.factory", "tests.system.factory:build"], tmp_path)
    assert (done.code, done.err) == (0, "")
