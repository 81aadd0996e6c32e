"""Serial equivalence of ranks in processes: direct mode's bits at every world size, one rank's numbers."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.jobs.ranks import open_ranks
from bagpipe.store.open import open_store
from tests.cacher.daemons import served
from tests.distributed.processes import run_ranks
from tests.effort import some_of
from tests.system.covering import covering
from tests.system.jobs import JobOutcome, change, largest_batch, run_job
from tests.system.test_exactness import MODELS
from trainer.job import run_job as run_rank
from trainer.observe.reporter import Reporter
from trainer.open_job import open_trainer_job

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

MakeConfig = Callable[..., Config]

#: Settings that must not change a bit of a job with a given world size and assignment.
AXES = {
    "world_size": (2, 4),
    "assign": ("contiguous", "locality"),
    "lookahead": (1, 8, 64),
    "cache": ("smallest", "auto, a few more", "auto"),
    "store": ("server", "servers"),
    "transport": ("embedded", "daemon"),
    "prefetch_depth": (1, 4),
}


def whole_job(membership: Membership, config: Config) -> dict[str, Any]:
    """One rank of a job, run as the program runs it."""
    return dataclasses.asdict(run_rank(config, membership=membership))


def dense_of_job(membership: Membership, config: Config) -> dict[str, Any]:
    """One rank of a job; returns its dense parameters, too."""
    torch.set_num_threads(1)
    with open_ranks(membership, timeout_s=20.0, device="cpu") as ranks, ExitStack() as stack:
        job = open_trainer_job(config, ranks, stack, Reporter())
        stack.enter_context(job.session)
        engine = job.open.engine
        trained = engine.train(job.source.batches("train", job.built.spec))
        ranks.gather(None)
        dense = {name: value.numpy() for name, value in engine.dense.model.state_dict().items()}
        return {"dense": dense, "samples": trained.progress.samples, "seed": torch.initial_seed()}


def unlike_job(membership: Membership, config: Config) -> dict[str, Any]:
    """A rank of a job whose rank 1 runs in another environment. Returns its standard error, too."""
    if membership.rank == 1:
        os.environ["OPENBLAS_CORETYPE"] = "Generic"
    with redirect_stderr(StringIO()) as err:
        return whole_job(membership, config) | {"err": err.getvalue()}


def run_processes(config: Config, world_size: int, folder: Path, work: Callable[..., Any] = whole_job) -> list[Any]:
    """Results of all ranks. The cacher is a thread of this process."""
    listen = f"unix:{folder}/{uuid.uuid4().hex[:8]}.sock"
    with served(config, listen):
        return run_to_the_end(change(config, cacher__url=listen), world_size, work)


def run_to_the_end(config: Config, world_size: int, work: Callable[..., Any] = whole_job) -> list[Any]:
    ends = run_ranks(world_size, work, change(config, run__peer_timeout_s=20.0))
    assert [end.error for end in ends] == [None] * world_size
    return [end.value for end in ends]


def digests_of(results: list[dict[str, Any]]) -> tuple[str, str]:
    first = results[0]
    for other in results[1:]:
        assert other == {**first, "skipped_rows": other["skipped_rows"]}, "every rank has the job's result"
    return first["dense_digest"], first["embedding_digest"]


class References:
    """Direct mode's digests by world size and assignment, each run once."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._digests: dict[tuple[object, ...], tuple[str, str]] = {}

    def of(self, world_size: int, assign: str) -> tuple[str, str]:
        key = world_size, assign
        if key not in self._digests:
            config = change(self._config, cache__rows=0, cacher__assign=assign, store__namespace=uuid.uuid4().hex)
            self._digests[key] = digests_of(run_processes(config, world_size, self._folder))
        return self._digests[key]


@pytest.fixture(scope="module")
def references(
    clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> References:
    config = change(clicks(eval_fraction=0.1), store__url=redis_servers[0])
    return References(config, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "row", some_of(covering(AXES, strength=2), {0, 2, 4, 5, 7}), ids=lambda row: "-".join(map(str, row.values()))
)
def test_every_pair_of_settings(
    row: dict[str, Any],
    clicks: MakeConfig,
    references: References,
    redis_servers: tuple[str, ...],
    tmp_path: Path,
) -> None:
    config, world_size = clicks(eval_fraction=0.1), row["world_size"]
    smallest = -(-largest_batch(config) // world_size)
    config = change(
        config,
        cache__rows=smallest if row["cache"] == "smallest" else "auto",
        cache__max_rows=smallest + 5 if row["cache"] == "auto, a few more" else 0,
        cache__prefetch_depth=row["prefetch_depth"],
        oracle__lookahead=row["lookahead"],
        cacher__assign=row["assign"],
        store__url={"server": redis_servers[0], "servers": ",".join(redis_servers)}[row["store"]],
        store__namespace=uuid.uuid4().hex,
    )
    if row["transport"] == "daemon":
        results = run_processes(config, world_size, tmp_path)
    else:
        results = run_to_the_end(config, world_size)
    assert digests_of(results) == references.of(world_size, row["assign"])
    if row["cache"] != "auto":
        assert results[0]["cache_rows"] <= smallest + 5


def assert_equal_numbers(alone: JobOutcome, config: Config, together: list[dict[str, Any]]) -> None:
    """Assert in float64: dense parameters and every row with its optimizer state agree within 1e-12."""
    schema = alone.built.rows
    url, namespace = config.store.url, config.store.namespace
    with open_store(url, namespace=namespace, schema=schema, buckets=config.store.buckets) as store:
        for number, table in enumerate(schema.tables):
            ids, rows = alone.rows[table.name]
            assert store.ids(number).tolist() == ids.tolist()
            np.testing.assert_allclose(store.read(number, ids).rows, rows, rtol=1e-12, atol=1e-12)
    for rank in together:
        for name, value in rank["dense"].items():
            np.testing.assert_allclose(value, alone.dense[name].numpy(), rtol=1e-12, atol=1e-12)
    assert sum(rank["samples"] for rank in together) == alone.trained.progress.samples
    assert [rank["seed"] for rank in together] == list(range(len(together))), "of a dropout, of each rank its own"


OPTIMIZERS = ("adagrad", "adam", "rowwise_adagrad", "sgd", "adagrad", "adam")
DENSE = ("adam", "sgd", "adagrad", "adam", "adagrad", "adagrad")


@pytest.mark.parametrize(
    ("model", "optimizer", "dense"),
    some_of(list(zip(MODELS, OPTIMIZERS, DENSE, strict=True)), {1, 3, 5}),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_two_ranks_equal_one(
    model: tuple[str, str],
    optimizer: str,
    dense: str,
    clicks: MakeConfig,
    redis_servers: tuple[str, ...],
    tmp_path: Path,
) -> None:
    config = change(clicks(model[1], model[0], optimizer), run__dtype="float64", optim__dense=dense)
    alone = run_job(change(config, cache__rows=0))
    config = change(
        config,
        cache__rows=-(-largest_batch(config) // 2),
        store__url=redis_servers[0],
        store__namespace=uuid.uuid4().hex,
    )
    assert_equal_numbers(alone, config, run_processes(config, 2, tmp_path, dense_of_job))


@pytest.mark.parametrize(
    "model",
    [pytest.param(("dlrm", "sum"), marks=pytest.mark.slow), ("factory", "everything")],
    ids=lambda model: "-".join(model),
)
def test_batches_smaller_than_the_world(
    model: tuple[str, str], clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path: Path
) -> None:
    """Some ranks have no example, most see no id of some table, and the last batch holds one example."""
    config = change(clicks(model[1], model[0], batch_size=3, limit=37), run__dtype="float64", optim__dense="adam")
    alone = run_job(change(config, cache__rows=0))
    config = change(config, cache__rows=30, store__url=redis_servers[0], store__namespace=uuid.uuid4().hex)
    assert_equal_numbers(alone, config, run_processes(config, 4, tmp_path, dense_of_job))


def test_the_result_covers_all_ranks(clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path: Path) -> None:
    config = change(clicks(eval_fraction=0.3, batch_size=3, limit=100), run__dtype="float64", cache__rows=500)
    alone = run_job(config)
    config = change(config, store__url=redis_servers[0], store__namespace=uuid.uuid4().hex)
    result = run_processes(config, 4, tmp_path)[0]
    progress = alone.trained.progress
    assert result["steps"] == progress.steps
    assert result["samples"] == progress.samples
    assert result["rows_unique"] == progress.rows_unique
    assert result["rows_written"] == progress.rows_written, "every row is written once, by its owner"
    assert result["loss"] == pytest.approx(float(progress.loss_sum) / progress.samples, rel=1e-12)
    assert (result["auc"], result["ne"]) == (alone.auc, pytest.approx(alone.ne, rel=1e-12))
    assert 0 < result["hit_rate"] < 1


def test_rank_0_names_the_ranks_of_unlike_hosts(clicks: MakeConfig, tmp_path: Path) -> None:
    config = change(clicks(), cache__rows=200, store__url="", run__steps=2)
    first, second = run_processes(config, 2, tmp_path, unlike_job)
    assert second["err"] == ""
    here = os.environ.get("OPENBLAS_CORETYPE", "not set")
    assert (
        f"note: not all ranks compute like rank 0 (unlike: 1): OPENBLAS_CORETYPE is {here!r} on rank 0 and 'Generic' on"
        in first["err"]
    )
    assert first["steps"] == 2


def test_a_model_with_buffers_and_dropout(clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path: Path) -> None:
    """Every rank has its own statistics and dropout, for any cache; the result has rank 0's."""
    config = change(
        clicks("everything", "factory", eval_fraction=0.2, limit=120),
        model__factory="tests.system.factory:normalised",
        store__url=redis_servers[0],
    )
    ends = []
    for rows in (0, 60):
        config = change(config, cache__rows=rows, store__namespace=uuid.uuid4().hex)
        ends.append(digests_of(run_processes(config, 2, tmp_path)))
    assert ends[0] == ends[1]
