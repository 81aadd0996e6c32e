"""Logs after a job's checkpoints. Whole jobs: `tests.system.test_resume`."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import FencedError, LostRowError, RolledBackError, StoreError
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.ranks import Ranks
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.memory.store import MemoryStore
from tests.jobs.facts import FACTS, ROWS
from tests.training.small import small_dense


def trained() -> dict[str, Any]:
    return {"read_ahead": 6, "timeout_s": 60.0, "cache": RowCache(ROWS, 10), "dense": small_dense()}


def test_the_end_of_a_job_without_files_removes_no_log_in_use() -> None:
    """The job can end right after one rank has closed its logs and before another has."""
    ranks = Ranks()
    ranks.world_size = 2
    name = uuid.uuid4().hex
    with (
        MemoryStore(ROWS, name=name) as own,
        MemoryStore(ROWS, name=name) as other,
        Checkpoints(CheckpointConfig(), StoreConfig(), ranks, FACTS, own, **trained()) as checkpoints,
    ):
        checkpoints.claim.take()
        other.fence(Fence(token=checkpoints.resume_point.token, writer=1, epoch=1))
        other.write(0, np.arange(3), np.ones((3, 8), np.float32))
        for epoch, step in enumerate((1_000, 1_001), start=1):
            own.rotate()
            checkpoints._close_logs(step, epoch, None)
        assert other.rotate().sum() > 0
        own.rotate()
        checkpoints._close_logs(2_000, 3, None)
        with own.ledger() as ledger:
            assert {log.epoch for state in ledger.state() for log in state.logs} == {2, 3, 4}


def test_rows_missing_at_the_end_are_an_error() -> None:
    """Without files, the set of rows is unknown, but the store still names its owner."""
    with (
        MemoryStore(ROWS, name=uuid.uuid4().hex) as store,
        Checkpoints(CheckpointConfig(), StoreConfig(), Ranks(), FACTS, store, **trained()) as checkpoints,
    ):
        checkpoints.check_rows()  # nothing claimed, nothing trained
        checkpoints.claim.take()
        checkpoints.check_rows()
        store._namespace.owner = ""
        with pytest.raises(RolledBackError, match="has no owner any more"):
            checkpoints.check_rows()


@pytest.mark.parametrize(("owner", "kind", "message"), [("", LostRowError, "row 1"), ("other", FencedError, "other")])
def test_a_lost_row_of_a_namespace_that_was_taken_over_says_so(
    owner: str, kind: type[StoreError], message: str
) -> None:
    """The recovery of the job that takes over deletes rows. After another store error it stays the cause."""

    def lose_a_row() -> None:
        with (
            MemoryStore(ROWS, name=uuid.uuid4().hex) as store,
            Checkpoints(CheckpointConfig(), StoreConfig(), Ranks(), FACTS, store, **trained()) as checkpoints,
        ):
            checkpoints.claim.take()
            store._namespace.owner = owner
            raise LostRowError("row 1")

    with pytest.raises(kind, match=message):
        lose_a_row()
