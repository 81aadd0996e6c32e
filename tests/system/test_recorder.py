"""Checkpoints during training: a job killed at any batch resumes and ends with an uninterrupted job's bits."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.written_rows import WrittenRows
from bagpipe.config.sections import Config
from bagpipe.errors import JobError, LostRowError
from bagpipe.pipeline.runner import Interrupted
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.engine import Engine, OnBatch
from bagpipe.training.progress import Progress
from tests.checkpoint.samples import rows_of
from tests.effort import some_of
from tests.system.jobs import change, largest_batch
from tests.system.recording import NUM_BUCKETS, Crash, RecordedOutcome, recorded
from tests.system.staging import staged

MakeConfig = Callable[..., Config]
Ids = NDArray[np.int64]

SLOW = pytest.mark.slow

#: Batches of the click log.
NUM_BATCHES = 26


def check(config: Config, root: Path, crashes: list[int], *, every: int = 3, world_size: int = 1) -> None:
    """Assert that a job killed after so many batches of each start ends like an uninterrupted one."""
    whole = recorded(config, root, every=1_000, world_size=world_size).run()
    job = recorded(config, root, every=every, world_size=world_size)
    for crash_at in crashes:
        with pytest.raises(Crash):
            job.run(crash_at=crash_at, crash_rank=crash_at % world_size)
    assert_alike(job.run(), whole)


def assert_alike(end: RecordedOutcome, whole: RecordedOutcome) -> None:
    assert end.digests == whole.digests
    assert end.totals == whole.totals


CRASHES = list(itertools.product([0, 10_000, None], [1, 4, 9, 17, 25]))


@pytest.mark.parametrize(
    ("rows", "crash_at"),
    [pytest.param(*case, marks=() if number % 5 == 1 else SLOW) for number, case in enumerate(CRASHES)],
)
def test_a_job_killed_anywhere(clicks: MakeConfig, tmp_path: Path, rows: int | None, crash_at: int) -> None:
    """No cache, a cache for all rows, and a cache that is always full."""
    config = clicks(optimizer="adam")
    rows = largest_batch(config) + 7 if rows is None else rows
    check(change(config, cache__rows=rows), tmp_path, [crash_at])


@pytest.mark.parametrize("seed", some_of(range(6), {0}))
def test_a_job_killed_repeatedly(clicks: MakeConfig, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = clicks(*rng.choice([("sum", "dlrm"), ("ragged", "wide-deep"), ("mixed", "deepfm")]), "adagrad")
    config = change(
        config,
        cache__rows=largest_batch(config) + rng.randrange(60),
        cache__prefetch_depth=rng.randint(1, 4),
        oracle__lookahead=rng.randint(1, 12),
        optim__dense="adam",
    )
    crashes = [rng.randint(1, 8) for _ in range(5)]
    check(config, tmp_path, crashes, every=rng.choice([1, 2, 5]))


@pytest.mark.parametrize(("world_size", "rows"), some_of([(2, 0), (3, None), (3, 0), (2, None)], {0}))
def test_ranks(clicks: MakeConfig, tmp_path: Path, world_size: int, rows: int | None) -> None:
    config = clicks(optimizer="adam", limit=18 * 12)
    rows = largest_batch(config) if rows is None else rows
    config = change(config, cache__rows=rows, optim__dense="adam")
    check(config, tmp_path, [5, 7, 4], world_size=world_size, every=4)


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [
        ("chimera", 2),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (("1f1b", 1), ("1f1b", 2), ("chimera", 1), ("zb-v", 1), ("zb-v", 2))
        ),
    ],
)
def test_stages(clicks: MakeConfig, tmp_path: Path, schedule: str, world_size: int) -> None:
    """With dropout, which is seeded by batch number."""
    config = change(
        clicks(limit=18 * 12),
        model__factory="tests.system.staged_models:dropping",
        cache__rows=200,
        optim__dense="adam",
    )
    check(staged(config, schedule, 2), tmp_path, [5, 7, 4], every=4, world_size=world_size)


def test_dropout_and_running_means(clicks: MakeConfig, tmp_path: Path) -> None:
    """Checkpoints hold the random state and the buffers at the time of the checkpoint."""
    config = clicks("everything", "factory", limit=18 * 12)
    config = change(config, model__factory="tests.system.factory:normalised", cache__rows=200)
    check(config, tmp_path, [5, 7, 4], every=2)


def test_a_finished_job_does_nothing(clicks: MakeConfig, tmp_path: Path) -> None:
    """A finished job does nothing when it is started again."""
    job = recorded(clicks(), tmp_path, every=0)
    whole = job.run()
    again = job.run()
    assert again.first_batch == NUM_BATCHES
    assert_alike(again, whole)


def test_a_job_continues_on_longer_data(clicks: MakeConfig, tmp_path: Path) -> None:
    """Batches are numbered across starts, and a job can resume from its final checkpoint."""
    config = change(clicks(optimizer="adam"), cache__rows=200)
    whole = recorded(config, tmp_path, every=0).run()
    job = recorded(change(config, data__limit=12 * 10), tmp_path, every=0)
    job.run()
    job.config = config
    end = job.run()
    assert end.first_batch == 10
    assert_alike(end, whole)


def test_logs_of_jobs_without_files(clicks: MakeConfig, tmp_path: Path) -> None:
    """Logs are closed at every checkpoint; no rows are copied."""
    config = change(clicks(), cache__rows=200)
    job = recorded(config, tmp_path, rows_only=True)
    end = job.run()
    assert end.digests == recorded(config, tmp_path, every=0).run().digests
    with job.stores[0].ledger() as ledger:
        logs = [log for state in ledger.state() for log in state.logs]
    assert {log.epoch for log in logs} == set(range(1, NUM_BATCHES // 3 + 3))


def test_a_full_disk_ends_the_job(clicks: MakeConfig, tmp_path: Path) -> None:
    """The error is one line, and earlier checkpoints are unchanged."""
    config = change(clicks(), cache__rows=200)
    whole = recorded(config, tmp_path, every=100).run()
    job = recorded(config, tmp_path)

    calls: list[int] = []

    def refuse(step: int) -> None:
        """The rows come second, after everything of the previous checkpoint."""
        calls.append(step)
        if calls.count(9) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    job.on_folder = refuse
    with pytest.raises(JobError, match=r"^a checkpoint cannot be written: No space left on device \(checkpoints\)"):
        job.run()
    job.on_folder = lambda step: None
    end = job.run()
    assert end.first_batch == 6
    assert_alike(end, whole)


def test_a_full_disk_of_one_rank_is_reported_immediately(clicks: MakeConfig, tmp_path: Path) -> None:
    """The publisher thread reports the error, since the rank's lanes can be waiting for the other ranks."""
    job = recorded(change(clicks(), cache__rows=200), tmp_path, world_size=2)
    reported: list[tuple[str, str]] = []
    is_full = itertools.chain([True], itertools.repeat(False))

    def refuse(step: int) -> None:
        if step == 9 and next(is_full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    def listen(engine: Engine) -> None:
        assert engine.peers is not None
        report = engine.peers.report

        def record_and_report(error: BaseException) -> BaseException:
            reported.append((threading.current_thread().name, str(error)))
            return report(error)

        engine.peers.report = record_and_report  # type: ignore[method-assign]

    job.on_folder, job.prepare = refuse, listen
    with pytest.raises(JobError):
        job.run()
    assert reported[0][0] == "bagpipe-publisher"
    assert "No space left on device" in reported[0][1]


def test_a_second_request_to_stop_does_not_wait_for_the_last_checkpoint(clicks: MakeConfig, tmp_path: Path) -> None:
    """The second request abandons the last checkpoint; the one before stays valid."""
    config = change(clicks(), cache__rows=200)
    whole = recorded(config, tmp_path, every=100).run()
    job = recorded(config, tmp_path)
    engines: list[Engine] = []
    ended = threading.Event()

    def stop_twice(step: int) -> None:
        if step == NUM_BATCHES:
            engines[0].request_stop()
            engines[0].request_stop()
            assert ended.wait(30)

    def watch(engine: Engine) -> None:
        engines.append(engine)
        recorder = engine.recorder
        assert recorder is not None
        finish = recorder.finish

        def watched(*arguments: Any) -> None:
            try:
                finish(*arguments)
            finally:
                ended.set()

        recorder.finish = watched  # type: ignore[method-assign]

    job.prepare, job.on_folder = watch, stop_twice
    with pytest.raises(Interrupted):
        job.run()
    job.prepare, job.on_folder = lambda engine: None, lambda step: None
    end = job.run()
    assert_alike(end, whole)


def test_deleted_rows_are_in_no_checkpoint(clicks: MakeConfig, tmp_path: Path) -> None:
    """Rows that no later batch uses are deleted at the write-back after their last use, also by a job that resumes."""
    config = change(clicks(optimizer="adam"), cache__rows=0)  # every row is written back for the next batch
    last: dict[tuple[int, int], int] = {}

    def note(engine: Engine) -> None:
        after_each_write(
            engine,
            lambda written, epoch, b: last.update(((table, i), b) for table, ids in written for i in ids.tolist()),
        )

    def delete(engine: Engine) -> None:
        def delete_unused(written: list[tuple[int, Ids]], epoch: int, b: int) -> None:
            asked = [
                DeleteRequest(table, ids[[last[table, i] == b < 20 for i in ids.tolist()]]) for table, ids in written
            ]
            engine.store.delete_many(asked)
            assert engine.recorder is not None
            engine.recorder.after_delete(asked, epoch, b)

        after_each_write(engine, delete_unused)

    plain = recorded(config, tmp_path, every=1_000)
    plain.prepare = note
    kept = plain.run()
    whole, job = recorded(config, tmp_path, every=1_000), recorded(config, tmp_path)
    whole.prepare = job.prepare = delete
    # Ended, not killed, at first: its last checkpoint is complete, however slow the publisher.
    job.change_batches = lambda rank, batches: itertools.islice(batches, 9)
    job.run()
    job.change_batches = lambda rank, batches: batches
    with pytest.raises(Crash):
        job.run(crash_at=16)
    end = job.run()
    assert end.first_batch >= 9
    assert_alike(end, whole.run())
    assert (end.digests[0], end.totals) == (kept.digests[0], kept.totals)
    checkpoint = CheckpointFolder(job.root).newest(pytest.fail)
    assert checkpoint is not None
    rows = rows_of(checkpoint)
    alive = {key for key, b in last.items() if b >= 20}
    assert 0 < len(alive) < len(last)
    with MemoryStore(rows.schema, name=job.name, num_buckets=NUM_BUCKETS) as store:
        found = [store.ids(table).tolist() for table in range(len(rows.schema.tables))]
    assert found == [rows.ids(table).tolist() for table in range(len(rows.schema.tables))]
    assert {(table, i) for table, ids in enumerate(found) for i in ids} == alive


def after_each_write(engine: Engine, call: Callable[[list[tuple[int, Ids]], int, int], None]) -> None:
    """Call with tables and ids, epoch and batch of every write-back, in its lane."""
    recorder = engine.recorder
    assert recorder is not None
    after_write = recorder.after_write

    def after(requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        after_write(requests, epoch, step)
        call([(request.table, request.ids) for request in requests], epoch, step)

    recorder.after_write = after  # type: ignore[method-assign]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_lost_row_is_named(clicks: MakeConfig, tmp_path: Path, resumes: bool) -> None:
    """A row written by this process, and a row known only from the checkpoint."""
    config = clicks()
    job = recorded(change(config, cache__rows=0), tmp_path)
    if resumes:
        # Ended, not killed: the last checkpoint is complete, however slow the publisher.
        job.change_batches = lambda rank, batches: itertools.islice(batches, 9)
        job.run()
        job.change_batches = lambda rank, batches: batches
    before = {"batch": -1}

    def lose(engine: Engine) -> OnBatch:
        """Delete the rows of one table after some batches, or before the first."""

        def forget(totals: Callable[[], Progress] | None = None) -> None:
            if before["batch"] < 0 and (totals is None or totals().steps == 12):
                before["batch"] = 0
                with engine.store.ledger() as ledger:
                    ids = engine.store.ids(0)
                    ledger.delete(np.zeros(len(ids), np.uint32), ids)

        if resumes:
            forget()
        return forget

    job.prepare = lose
    with pytest.raises(LostRowError, match=r"table \w+ id -?\d+ was written, but is not in the store any more"):
        job.run()


BOUNDED = """
label = "label"
dense = ["d0", "d1", "d2"]
sparse = ["user", "items", "topic"]
[table_defaults]
rows = 97
hash = true
"""


@pytest.mark.parametrize("loses", [False, True])
def test_a_row_that_another_rank_wrote(clicks: MakeConfig, tmp_path: Path, loses: bool) -> None:
    """The plan of bounded tables knows all rows that ever existed; no row counts as lost if none is missing."""
    schema = tmp_path / "bounded.toml"
    schema.write_text(BOUNDED)
    config = change(clicks(), data__schema=str(schema))
    job = recorded(change(config, cache__rows=largest_batch(config) // 2 + 5), tmp_path, world_size=2)

    def lose(engine: Engine) -> OnBatch:
        def forget(totals: Callable[[], Progress]) -> None:
            assert engine.peers is not None
            if engine.peers.rank == 0 and totals().steps == 12:
                for table in range(3):
                    ids = engine.store.ids(table)
                    with engine.store.ledger() as ledger:
                        ledger.delete(np.full(len(ids), table, np.uint32), ids)
            # Rows written by this rank would be known anyway.
            assert engine.recorder is not None
            engine.recorder.written = WrittenRows()

        return forget

    if not loses:
        job.run()
        return
    job.prepare = lose
    with pytest.raises(LostRowError):
        job.run()


def test_the_checkpoint_stall_is_reported(clicks: MakeConfig, tmp_path: Path) -> None:
    result = recorded(change(clicks(), cache__rows=200), tmp_path).run().results[0]
    assert 0 < result.checkpoint_stall_s < result.progress.elapsed_s
