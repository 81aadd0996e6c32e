"""Rows and records that a job leaves in its namespace. Whole jobs: `tests.system.test_existing_rows`."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import CorruptRowError, InputError, JobError, StoreError
from bagpipe.jobs.claim import Claim
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.resume_point import start_generation
from bagpipe.store.job_record import JobRecord
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.fence_jobs import take_over
from tests.jobs.facts import FACTS, ROWS

IDS = np.arange(40, dtype=np.int64)


class Job:
    """Starts of jobs on one namespace."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.adopted: list[Checkpoint] = []

    def open_store(self) -> MemoryStore:
        return MemoryStore(ROWS, name=self.name, namespace="n", num_buckets=4)

    def claim(self, store: MemoryStore, folder: Path | None = None, existing: str = "refuse") -> Claim:
        namespace = StoreConfig(namespace="n", existing=existing)  # type: ignore[arg-type]
        checkpoints = CheckpointConfig(dir="" if folder is None else str(folder))
        start = start_generation(checkpoints, namespace, Ranks(), FACTS, store)
        checkpoint = start.checkpoint
        rows = None if checkpoint is None else CheckpointRows(checkpoint.folder, checkpoint.manifest, ROWS)
        return Claim(namespace, Ranks(), store, start, rows=rows, on_adopted=self.adopted.append)

    def train(
        self, error: BaseException | None = None, *, existing: str = "refuse", has_published: bool = False
    ) -> None:
        with self.open_store() as store, self.claim(store, existing=existing) as claim:
            claim.take()
            claim.has_published = has_published
            store.write(0, IDS, np.ones((len(IDS), 8), np.float32))
            if error is not None:
                raise error
            claim.finish(steps=3, dense_digest="ab", stopped=False)

    def left(self) -> tuple[bool, int, JobRecord | None]:
        """Whether the namespace has a schema record, its number of rows, and its job record."""
        with self.open_store() as store, store.ledger() as ledger:
            return store.check(), sum(state.num_rows for state in ledger.state()), ledger.job()


def test_a_refused_job_leaves_nothing_in_a_new_namespace() -> None:
    job = Job()
    with pytest.raises(InputError, match="bad row"):
        job.train(InputError("bad row"))
    assert job.left() == (False, 0, None)
    job.train()
    assert job.left()[:2] == (True, len(IDS))


def test_a_refused_job_keeps_rows_that_a_checkpoint_names() -> None:
    job = Job()
    with pytest.raises(InputError):
        job.train(InputError("bad row"), has_published=True)
    _, num_rows, record = job.left()
    assert num_rows == len(IDS)
    assert record is not None
    assert record.state == "failed"


def test_a_refused_job_keeps_rows_that_it_did_not_make() -> None:
    job = Job()
    job.train()
    with pytest.raises(InputError):
        job.train(InputError("bad row"), existing="rows-only")
    assert job.left()[1] == len(IDS)


@pytest.mark.parametrize("error", [JobError("a loss is not finite"), CorruptRowError("row 1"), KeyboardInterrupt()])
def test_a_failed_job_keeps_its_rows_and_says_so(error: BaseException) -> None:
    job = Job()
    with pytest.raises(type(error)):
        job.train(error)
    _, num_rows, record = job.left()
    assert num_rows == len(IDS)
    assert record is not None
    assert (record.state, record.has_checkpoints) == ("failed", False)


def test_a_refused_job_that_was_taken_over_removes_nothing() -> None:
    def be_refused() -> None:
        with job.open_store() as store, job.claim(store) as claim, job.open_store() as other:
            claim.take()
            take_over(other, generation=9)
            other.write(0, IDS, np.ones((len(IDS), 8), np.float32))
            raise InputError("bad row")

    job = Job()
    with pytest.raises(InputError, match="bad row"):
        be_refused()
    assert job.left()[:2] == (True, len(IDS))


def test_the_record_says_how_the_job_ended() -> None:
    job = Job()
    job.train()
    record = job.left()[2]
    assert record is not None
    assert (record.state, record.steps, record.dense_digest) == ("finished", 3, "ab")
    with pytest.raises(InputError, match=r"40 rows of job .* finished after 3 steps, dense digest ab: set"):
        job.train()
    job.train(existing="reset")
    assert job.left()[1] == len(IDS)


def test_rows_of_another_job_become_the_first_checkpoint(tmp_path: Path) -> None:
    job = Job()
    job.train()
    with job.open_store() as store, job.claim(store, tmp_path, "rows-only") as claim:
        assert not claim.take()
        assert claim.continued
        (adopted,) = job.adopted
        assert CheckpointRows(adopted.folder, adopted.manifest, ROWS).ids(0).tolist() == IDS.tolist()
    # A later start of the same job owns them.
    with job.open_store() as store, job.claim(store, tmp_path) as claim:
        assert not claim.take()
        assert not claim.continued


def test_attempts_of_a_launcher_do_not_train_rows_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.train()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match=r"previous attempt has trained.*set checkpoint\.dir"):
        job.train(existing="rows-only")
    job.train(existing="reset")


def test_a_store_error_stays_the_cause() -> None:
    job = Job()
    with pytest.raises(StoreError, match="lost"):
        job.train(StoreError("lost"))
