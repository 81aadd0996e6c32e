"""Recovery restores the checkpoint's rows from any state of the store, and never changes another job's rows."""

from __future__ import annotations

import secrets
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.recovery import Recovered, is_usable, recover
from bagpipe.errors import CorruptRowError, FencedError, InputError
from bagpipe.store.fencing.fence import BucketState, Ledger, LogState, invalidated
from bagpipe.store.interface import DeleteRequest, ReadResult, Store
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from tests.checkpoint.rows_of_jobs import RowsOfJob, no_warning, stored
from tests.checkpoint.samples import LINEAGE, SCHEMA, Model, draw_rows, three_checkpoints
from tests.effort import costly

OTHER = LINEAGE[::-1]
PLACE = "store.namespace 'x'"


class Interrupted(Exception):
    """Simulated death of the process."""


class DyingLedger:
    """A ledger that raises before a call of one kind."""

    def __init__(self, ledger: Ledger, at: str) -> None:
        self._ledger = ledger
        self._at = at

    def __getattr__(self, name: str) -> object:
        if name == self._at:
            raise Interrupted
        return getattr(self._ledger, name)


def open_memory(stack: ExitStack, name: str, ranks: int) -> list[Store]:
    return [stack.enter_context(MemoryStore(SCHEMA, name=name, num_buckets=4)) for _ in range(ranks)]


@costly(25)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.sampled_from([1, 2]))
def test_every_start_finds_the_rows_of_the_newest_checkpoint(seed: int, ranks: int) -> None:
    """Jobs die between batches, between manifest and commit, and in a recovery; some stores lose all rows."""
    random = np.random.default_rng(seed)
    committed: dict[str, Model] = {}
    with TemporaryDirectory() as path, ExitStack() as stack:
        folder, name = CheckpointFolder(Path(path)), uuid.uuid4().hex
        for _ in range(5):
            if random.random() < 0.2:
                name = uuid.uuid4().hex  # the store returns empty
            stores = open_memory(stack, name, ranks)
            ledger = stores[0].ledger()
            dying = random.choice(["", "acquire", "touched", "delete", "invalidate", "drop", "begin", "commit"])
            try:
                job = RowsOfJob.start(
                    stack,
                    folder,
                    stores,
                    DyingLedger(ledger, dying),
                    committed,
                    keep=2,
                    full_every=2,  # type: ignore[arg-type]
                )
                found = folder.newest(no_warning)
                assert found is not None
                assert stored(stores[0]) == committed[found.manifest.checkpoint_id] == job.newest
                work(job, random)
            except Interrupted:
                continue


def work(job: RowsOfJob, random: np.random.Generator) -> None:
    """Batches, write-backs and checkpoints in any order. Some checkpoints are not published, but the last one is."""
    for _ in range(random.integers(1, 12)):
        what = random.integers(0, 5)
        if what == 0 and job.step > job.publishers[0].newest.manifest.step:
            step, parts = job.step, job.snapshot()
            job.train(draw_rows(random, 10))
            job.write_back(random.random(), random)
            if random.random() < 0.2:
                return
            job.publish(step, parts)
        elif what == 1:
            job.write_back(random.random(), random)
        elif what == 2 and job.step:
            job.delete({*(key for key in job.newest if random.random() < 0.3), *draw_rows(random, 3)})
        else:
            job.train(draw_rows(random, 15))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[RowsOfJob, str]]:
    """A job with a checkpoint and rows written since."""
    name = uuid.uuid4().hex
    with ExitStack() as stack:
        stores = open_memory(stack, name, 1)
        job = RowsOfJob.start(stack, CheckpointFolder(tmp_path), stores, stores[0].ledger(), {})
        begin(job)
        yield job, name


def begin(job: RowsOfJob) -> None:
    """Publish a checkpoint of three rows, change one of them, and write another one."""
    job.train({(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0})
    job.write_back(1.0, np.random.default_rng())
    job.publish(job.step, job.snapshot())
    job.train({(0, 1): 7.0, (0, 9): 8.0})
    job.write_back(1.0, np.random.default_rng())


def again(job: RowsOfJob, name: str, stack: ExitStack) -> RowsOfJob:
    stores = open_memory(stack, name, 1)
    return RowsOfJob.start(stack, job.folder, stores, stores[0].ledger(), job.committed)


def test_only_what_changed_is_written(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
        done = later.recovered
        assert (done.buckets_reloaded, done.rows_written, done.rows_deleted) == (0, 1, 1)


def test_deletions_since_the_checkpoint_are_undone(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    job.delete({(0, 9), (1, 2)})
    job.train({(0, 9): 5.0})  # a new row
    job.write_back(1.0, np.random.default_rng())
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
        done = later.recovered
        assert (done.buckets_reloaded, done.rows_written, done.rows_deleted) == (0, 2, 1)


@pytest.mark.parametrize("loses", [False, True])
def test_deletions_before_the_checkpoint_stay(started: tuple[RowsOfJob, str], loses: bool) -> None:
    """Also in a store that has lost all rows. The rows came again after the checkpoint."""
    job, name = started
    job.delete({(0, 9), (1, 2)})
    job.publish(job.step, job.snapshot())
    job.train({(0, 9): 5.0, (1, 2): 6.0})
    job.write_back(1.0, np.random.default_rng())
    with ExitStack() as stack:
        later = again(job, uuid.uuid4().hex if loses else name, stack)
        assert stored(later.stores[0]) == {(0, 1): 7.0, (2, 3): 3.0}
        assert later.recovered.rows_deleted == (0 if loses else 2)


def test_the_previous_job_is_fenced_off(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    with ExitStack() as stack:
        later = again(job, name, stack)
        job.train({(0, 5): 5.0})
        with pytest.raises(FencedError):
            job.write_back(1.0, np.random.default_rng())
        assert (0, 5) not in stored(later.stores[0])


def test_untrusted_rows_are_all_loaded(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    job.ledger.invalidate(invalidated(job.publishers[0].newest.manifest.checkpoint_id))
    job.stores[0].write_many([])
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
        assert later.recovered.rows_written == 3
        assert later.recovered.buckets_reloaded > 0


def test_a_bucket_with_unexpected_rows_is_loaded(started: tuple[RowsOfJob, str]) -> None:
    """A row is deleted; the bucket's checkpoint id is right, and its logs do not mention the row."""
    job, name = started
    job.ledger.delete(np.array([1], np.uint32), np.array([2], np.int64))
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
        assert later.recovered.buckets_reloaded == 1


DELETED = ((0, [1, 9, 77]), (1, [2]), (2, [3]))


def check_undo(job: RowsOfJob, stack: ExitStack, stores: list[Store]) -> None:
    """A later start has all rows of the checkpoint again, and none that is newer."""
    requests = [DeleteRequest(table, np.array(ids)) for table, ids in DELETED]
    job.stores[0].delete_many(requests)
    assert stored(job.stores[0]) == {}
    job.train({(2, 3): 6.0})
    job.write_back(1.0, np.random.default_rng())
    ledger = stack.enter_context(stores[0].ledger())
    later = RowsOfJob.start(stack, job.folder, stores, ledger, job.committed)
    assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
    done = later.recovered
    assert (done.buckets_reloaded, done.rows_written, done.rows_deleted) == (0, 3, 2)
    with pytest.raises(FencedError):
        job.stores[0].delete_many(requests)


def test_deletions_of_another_writer_are_undone(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    with ExitStack() as stack:
        check_undo(job, stack, open_memory(stack, name, 1))


@pytest.mark.redis
def test_deletions_from_a_server_are_undone(redis_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stores: list[Store] = [
            stack.enter_context(RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=4))
            for _ in range(2)
        ]
        ledgers = [stack.enter_context(store.ledger()) for store in stores]
        job = RowsOfJob.start(stack, CheckpointFolder(tmp_path), stores[:1], ledgers[0], {})
        begin(job)
        check_undo(job, stack, stores[1:])


def recover_later(store: Store, ledger: Ledger, checkpoint: Checkpoint, *, audits: bool) -> Recovered:
    """Recovery by a later start, with or without an audit of the rows."""
    rows = CheckpointRows(checkpoint.folder, checkpoint.manifest, SCHEMA)
    return recover(
        store,
        ledger,
        token=f"9-{secrets.token_hex(16)}",
        checkpoint=checkpoint.manifest,
        rows=rows,
        num_writers=1,
        audit=rows.sums(4) if audits else None,
    )


@pytest.mark.parametrize("audits", [True, False])
def test_a_row_set_back_is_found_by_an_audit(started: tuple[RowsOfJob, str], audits: bool) -> None:
    """No log mentions the row, and the bucket has as many rows as before."""
    job, name = started
    checkpoint = job.publishers[0].newest
    with MemoryStore(SCHEMA, name=name, num_buckets=4) as store, store.ledger() as ledger:
        store.write(1, np.array([2]), np.full((1, SCHEMA.row_width(1)), 0.5, np.float32))
        done = recover_later(store, ledger, checkpoint, audits=audits)
        assert stored(store) == {(0, 1): 1.0, (1, 2): 2.0 if audits else 0.5, (2, 3): 3.0}
        assert (done.buckets_changed, done.buckets_reloaded) == (int(audits), int(audits))


def test_an_audit_that_meets_a_damaged_row_loads_all_rows(started: tuple[RowsOfJob, str]) -> None:
    job, name = started
    checkpoint = job.publishers[0].newest
    with DamagedStore(SCHEMA, name=name, num_buckets=4) as store, store.ledger() as ledger:
        done = recover_later(store, ledger, checkpoint, audits=True)
        assert (done.buckets_changed, done.buckets_reloaded) == (4, 4)
    assert stored(job.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}


class DamagedStore(MemoryStore):
    """A store that refuses every row it reads."""

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        raise CorruptRowError("its check word does not match")


def test_another_lineage_begins_during_recovery(started: tuple[RowsOfJob, str], tmp_path: Path) -> None:
    """It begins between the inspection of the namespace and its acquisition."""
    job, name = started
    before = stored(job.stores[0])
    checkpoint = replace(job.publishers[0].newest.manifest, lineage=OTHER, parts=())
    refused = pytest.raises(InputError, match=r"^it holds 4 rows of an unknown job")
    with MemoryStore(SCHEMA, name=name, num_buckets=4) as store, refused:
        recover(
            store,
            store.ledger(),
            token=f"1-{secrets.token_hex(16)}",
            checkpoint=checkpoint,
            rows=CheckpointRows(tmp_path, checkpoint, SCHEMA),
            num_writers=1,
            namespace="it",
        )
    assert stored(job.stores[0]) == before


def test_a_folder_and_its_copy(started: tuple[RowsOfJob, str], tmp_path: Path) -> None:
    """Also restored from a backup: generation numbers repeat, but rows are distinguished."""
    job, name = started
    copy = CheckpointFolder(shutil.copytree(job.folder.path, tmp_path / "copy"))
    for folder, value in ((job.folder, 5.0), (copy, 6.0)):
        with ExitStack() as stack:
            stores = open_memory(stack, name, 1)
            later = RowsOfJob.start(stack, folder, stores, stores[0].ledger(), job.committed)
            later.train({(0, 1): value})
            later.write_back(1.0, np.random.default_rng())
            later.publish(later.step, later.snapshot())
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 5.0, (1, 2): 2.0, (2, 3): 3.0}


def test_recovery_to_an_earlier_step(started: tuple[RowsOfJob, str], tmp_path: Path) -> None:
    """The checkpoint ids are those of a later checkpoint, so nothing in the store can be used."""
    job, name = started
    job.publish(job.step, job.snapshot())
    newest = job.publishers[0].newest
    (newest.folder / "manifest.json").unlink()
    with ExitStack() as stack:
        later = again(job, name, stack)
        assert stored(later.stores[0]) == {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 3.0}
        assert later.recovered.buckets_reloaded > 0


def test_a_bucket_is_usable_if_its_logs_are_complete(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path)
    checkpoint = checkpoints[-1].manifest

    def state(checkpoint_id: str, *groups: int, token: str = checkpoint.token, epoch: int = 1) -> BucketState:
        logs = (LogState(token=token, epoch=epoch, writer=rank, num_groups=n) for rank, n in enumerate(groups))
        return BucketState(owner=token, checkpoint_id=checkpoint_id, logs=tuple(logs))

    assert is_usable(state(checkpoint.checkpoint_id), 0, checkpoint)
    assert is_usable(state(checkpoint.parent_checkpoint_id, 1, 1), 0, checkpoint)
    assert is_usable(state(checkpoint.parent_checkpoint_id, 4, 4), 3, checkpoint)
    for lost in (
        state(""),
        state(invalidated(checkpoint.checkpoint_id)),
        state(f"{LINEAGE}:1:999"),
        state(checkpoint.parent_checkpoint_id),
        state(checkpoint.parent_checkpoint_id, 1),
        state(checkpoint.parent_checkpoint_id, 1, 0),
        state(checkpoint.parent_checkpoint_id, 1, 2),
        state(checkpoint.parent_checkpoint_id, 1, 1, epoch=2),
        state(checkpoint.parent_checkpoint_id, 1, 1, token=f"9-{secrets.token_hex(16)}"),
    ):
        assert not is_usable(lost, 0, checkpoint), lost
