"""Logs after a job's checkpoints. Whole jobs: `tests.system.test_resume`."""

from __future__ import annotations

import dataclasses
import shutil
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import FencedError, InputError, JobError, LostRowError, PeerError, RolledBackError, StoreError
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.job import RankDense
from bagpipe.jobs.ranks import Ranks
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.part import LoopPart, LoopRun
from tests.jobs.facts import FACTS, ROWS
from tests.jobs.small_job import SmallJob
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


class _Fails(LoopPart):
    """Raises an error when its tensors are loaded, when a run begins, or at the end of the first batch."""

    name = "average"  # one that a job can start from

    def __init__(self, at: str, error: BaseException) -> None:
        self._at = at
        self._error = error

    def load_tensors(self, tensors: Any) -> None:
        self._raise("load")

    def start(self, run: LoopRun) -> None:
        self._raise("start")

    def finish_batch(self, b: int) -> None:
        self._raise("batch")

    def _raise(self, at: str) -> None:
        if at == self._at:
            raise self._error


def train(folder: Path, *, first: Path | None = None, part: LoopPart | None = None) -> tuple[str, str]:
    """Train two batches of a small job with checkpoints in a folder."""
    small = SmallJob(folder=folder)
    parts = () if part is None else (part,)

    def make(cache: RowCache, ranks: Ranks, stack: ExitStack) -> RankDense:
        return dataclasses.replace(small._make_dense(cache, ranks, stack), parts=parts)

    start_from = "" if first is None else str(first)
    checkpoint = dataclasses.replace(small.job.checkpoint, start_from=start_from)
    small.job = dataclasses.replace(small.job, make_dense=make, checkpoint=checkpoint)
    with small.session() as session:
        begin = session.job.checkpoints.first_batch
        small.train(session, begin, begin + 2)
        return small.digests(session)


@pytest.mark.parametrize("at", ["load", "start"])
@pytest.mark.parametrize("error", [InputError("no"), PeerError("gone"), ZeroDivisionError()])
def test_a_refusal_after_the_first_checkpoint_leaves_none(tmp_path: Path, at: str, error: Exception) -> None:
    """What is corrected starts as if nothing had been; also in a folder with checkpoints of other jobs."""
    train(tmp_path / "day0")
    expected = train(tmp_path / "expected", first=tmp_path / "day0")
    folder = CheckpointFolder(tmp_path / "day1")
    with pytest.raises(type(error)):
        train(folder.path, first=tmp_path / "day0", part=_Fails(at, error))
    assert folder.positions() == ()
    assert train(folder.path, first=tmp_path / "day0") == expected
    before = folder.positions()
    with pytest.raises(type(error)):  # of a resumed job
        train(folder.path, first=tmp_path / "day0", part=_Fails(at, error))
    assert folder.positions() == before


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("start", StoreError("not there")),
        ("start", JobError("the cacher ended")),
        ("load", SystemExit(130)),  # a signal
        ("batch", InputError("a bad batch")),  # the store has rows now
    ],
)
def test_a_job_that_fails_otherwise_resumes_its_first_checkpoint(tmp_path: Path, at: str, error: BaseException) -> None:
    train(tmp_path / "day0")
    expected = train(tmp_path / "expected", first=tmp_path / "day0")
    with pytest.raises(type(error)):
        train(tmp_path / "day1", first=tmp_path / "day0", part=_Fails(at, error))
    shutil.rmtree(tmp_path / "day0")
    assert train(tmp_path / "day1", first=tmp_path / "day0") == expected
