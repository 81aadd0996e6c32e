"""Publishing: the checkpoint a restart finds after each save, and failed checkpoints."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import Part
from bagpipe.errors import JobError
from bagpipe.store.memory.store import MemoryStore
from tests.checkpoint.rows_of_jobs import RowsOfJob, no_warning
from tests.checkpoint.samples import LINEAGE, SCHEMA, content, draw_rows, rows_of


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, folder: Path, ranks: int = 1, **options: int) -> RowsOfJob:
    name = uuid.uuid4().hex
    stores = [stack.enter_context(MemoryStore(SCHEMA, name=name, num_buckets=4)) for _ in range(ranks)]
    return RowsOfJob.start(stack, CheckpointFolder(folder), list(stores), stores[0].ledger(), {}, **options)


def test_full_files_replace_many(tmp_path: Path, stack: ExitStack) -> None:
    random = np.random.default_rng(1)
    job = started(stack, tmp_path, keep=1, full_every=3)
    for number in range(1, 11):
        job.train(draw_rows(random, 40))
        job.write_back(0.5, random)
        job.publish(job.step, job.snapshot())
        found = job.folder.newest(no_warning)
        assert found is not None
        assert content(rows_of(found)) == job.newest
        assert len({file.step for file in found.manifest.row_files}) <= 5
        assert any(file.full for file in found.manifest.row_files) == (number > 3)
        assert job.folder.positions() == ((1, number),)


def test_publishing_commits_in_the_store(tmp_path: Path, stack: ExitStack) -> None:
    job = started(stack, tmp_path, ranks=2)
    for _ in range(3):
        job.train(draw_rows(np.random.default_rng(2), 40))
        job.write_back(0.5, np.random.default_rng(3))
        job.publish(job.step, job.snapshot())
        states = job.ledger.state()
        assert {state.checkpoint_id for state in states} == {f"{LINEAGE}:{job.token}:{job.step}"}
        assert {log.epoch for state in states for log in state.logs if log.epoch} == {job.epoch}
    assert job.publishers[0].num_published == 3


def parts_of(job: RowsOfJob, *digests: dict[str, str]) -> list[Part]:
    job.train({(0, 1): 1.0})
    parts = job.snapshot()
    return [dataclasses.replace(part, progress={"dense": digest}) for part, digest in zip(parts, digests, strict=True)]


def test_replicas_that_differ_are_not_published(tmp_path: Path, stack: ExitStack) -> None:
    job = started(stack, tmp_path, ranks=3)
    parts = parts_of(job, {"0": "a"}, {"1": "b"}, {"0": "a", "1": "c"})
    with pytest.raises(JobError, match=r"ranks 1 and 2 hold different dense parameters \(1, digests b and c\)"):
        job.publish(job.step, parts)
    assert job.folder.positions() == ((1, 0),)
    parts = parts_of(job, {"0": "a"}, {"1": "b"}, {"0": "a", "1": "b"})
    job.publish(job.step, parts)
    assert job.folder.positions()[0] == (1, job.step)


def test_parts_are_waited_for(tmp_path: Path, stack: ExitStack) -> None:
    job = started(stack, tmp_path, ranks=2)
    parts = parts_of(job, {}, {})
    publishing = threading.Thread(target=job.publishers[0], args=(job.step, 1, parts[0]))
    publishing.start()
    job.publishers[1](job.step, 1, parts[1])
    publishing.join(20)
    assert job.folder.positions()[0] == (1, job.step)


def test_waits_have_a_deadline(tmp_path: Path, stack: ExitStack) -> None:
    job = started(stack, tmp_path, ranks=2)
    parts = parts_of(job, {}, {})
    job.publishers[0]._timeout_s = 0.05
    with pytest.raises(JobError, match="not all ranks wrote their part in 0"):
        job.publishers[0](job.step, 1, parts[0])
    job.publishers[0].close()
    with pytest.raises(JobError, match="was cancelled: the job has ended"):
        job.publishers[0](job.step, 1, parts[0])
    assert job.folder.positions() == ((1, 0),)
