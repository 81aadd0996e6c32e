"""Training on planned batches: the same as without a planner, and ranks with own batches equal one rank."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.lookahead.ids import concatenate, empty_batch
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.ranked import RankedPlanner
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import LocalPeers
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table
from tests.distributed.threads import run_threads
from tests.system.rank_threads import RankOrderSum

pytestmark = pytest.mark.multiproc

ROWS = 40
SCHEMA = DataSchema(
    label="label",
    dense=("I1",),
    features=(Feature(name="f", table="f"), Feature(name="g", table="g")),
    tables=(Table(name="f", rows=ROWS), Table(name="g", rows=ROWS)),
)
SETTINGS = PlainSettings(schema=SCHEMA, cache_rows=2 * ROWS, rows="adagrad", dtype="float64", lookahead=3)


def batches(sizes: list[int], seed: int) -> list[Batch]:
    """Batches of these numbers of examples."""
    generator = np.random.default_rng(seed)
    return [
        Batch(
            index=index,
            dense=generator.random((size, 1), np.float32),
            values=generator.integers(0, ROWS, 2 * size),
            lengths=np.ones((2, size), np.int32),
            labels=(generator.random(size) < 0.4).astype(np.float32),
        )
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("planner", [InlinePlanner, PlannerProcess])
def test_a_planner_changes_no_bit(planner: type[WindowPlanner]) -> None:
    with PlainJob(SETTINGS) as job:
        job.train(batches([16] * 9, seed=1))
        expected = job.digests()
    with PlainJob(SETTINGS) as job, planner(job.spec) as planned:
        job.engine.train(planned.run(batches([16] * 9, seed=1)))
        assert job.digests() == expected


def all_rows(store: Any) -> list[np.ndarray[Any, Any]]:
    return [store.read(table, np.arange(ROWS)).rows.copy() for table in range(2)]


def joined(parts: tuple[Batch, ...]) -> Batch:
    """The global batch, with dense inputs and labels."""
    return dataclasses.replace(
        concatenate(parts),
        dense=np.concatenate([part.dense for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
    )


def test_ranks_with_own_batches_equal_one_rank() -> None:
    """Batches of unlike sizes, and one rank's end before the other's."""
    own = [batches([5, 9, 16, 1, 7, 3, 8], seed=1), batches([11, 2, 4, 6], seed=2)]
    padded = [*own[1], *(dataclasses.replace(empty_batch(n, 2), dense=np.zeros((0, 1), np.float32)) for n in (4, 5, 6))]
    with PlainJob(SETTINGS) as job:
        job.train(map(joined, zip(own[0], padded, strict=True)))
        model = [parameter.detach().clone() for parameter in job.model.parameters()]
        rows = all_rows(job.store)

    barrier, sums = threading.Barrier(2, timeout=250), list[RankOrderSum]()

    def store_of(schema: RowSchema) -> MemoryStore:
        return MemoryStore(schema, name="own-batches", num_buckets=8)

    started = threading.Lock()

    def train(peers: LocalPeers) -> Any:
        with started:
            job = PlainJob(SETTINGS, make_store=store_of)
        spec = dataclasses.replace(job.spec, world_size=2)
        with job, RankedPlanner(spec, peers.plans, planner=InlinePlanner, uneven="join") as planner:
            dense = job.make_dense(replicas=RankOrderSum(list(job.model.parameters()), sums, barrier))
            engine = job.make_engine(
                dense, peers=peers, claim=lambda: any(peers.gather(peers.rank == 0 and job.store.claim()))
            )
            engine.train(planner.run(own[peers.rank]))
            peers.gather(None)
            return list(job.model.parameters()), all_rows(job.store)

    for end in run_threads(2, train, timeout_s=60):
        assert end.error is None
        found_model, found_rows = end.value
        for mine, one in zip(found_model, model, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)
        for mine, one in zip(found_rows, rows, strict=True):
            np.testing.assert_allclose(mine, one, rtol=1e-12, atol=1e-12)
