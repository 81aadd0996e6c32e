"""Fixtures of whole-job tests: the click log, its schemas, job configurations and a store server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bagpipe.config.sections import Config, DataConfig, ModelConfig, OptimConfig, StoreConfig
from bagpipe.store.server.embedded import EmbeddedServer
from tests.system.clicks import write_clicks, write_schemas
from tests.system.writes import Writes, client_of


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """Returns a function that makes the configuration of a small job on the click log: ``clicks(schema, model,
    optimizer)``.
    """
    folder = tmp_path_factory.mktemp("clicks")
    path = write_clicks(folder / "clicks.parquet")
    schemas = write_schemas(folder)

    def make(schema: str = "sum", model: str = "dlrm", optimizer: str = "adagrad", **data: object) -> Config:
        values: dict[str, object] = {"batch_size": 12, "eval_fraction": 0.0, **data}
        factory = "tests.system.factory:build" if model == "factory" else ""
        return Config(
            data=DataConfig(path=str(path), format="parquet", schema=str(schemas[schema]), **values),  # type: ignore[arg-type]
            store=StoreConfig(url="memory://", buckets=8),
            model=ModelConfig(
                name="dlrm" if factory else model, embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,), factory=factory
            ),
            # A large step size and a small eps make a wrong row stand out from rounding.
            optim=OptimConfig(rows=optimizer, rows_lr=0.1, dense_lr=0.05, eps=1e-6),
        )

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A store server of this test that publishes every write."""
    with EmbeddedServer(tmp_path / "server") as server:
        with client_of(server.url) as client:
            client.config_set("notify-keyspace-events", "Kh")
        yield server


@pytest.fixture
def writes(server: EmbeddedServer, namespace: str) -> Iterator[Writes]:
    """Writes into the test's namespace on its own server."""
    writes = Writes(server.url, namespace)
    yield writes
    writes.close()
