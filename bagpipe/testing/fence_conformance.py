"""Conformance checks of fencing: rejected writers, touched rows, epochs and checkpoints in the ledger.

Part of `bagpipe.testing.store_conformance`, which runs these checks with its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, LogState, invalidated
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.testing.fence_jobs import (
    SCHEMA,
    MakeStore,
    drop_all,
    holds,
    ids_of,
    new_name,
    new_token,
    raises,
    rows_of,
    simulated_job,
    touched_ids,
    unfenced,
)

__all__ = ["FENCE_CHECKS"]

_INT64 = np.iinfo(np.int64)


def check_fenced_rows_are_like_others(make_store: MakeStore) -> None:
    name, ids = new_name(), np.unique(np.random.default_rng(1).integers(_INT64.min, _INT64.max, 5_000))
    with simulated_job(make_store, name, 1) as job:
        job.write(ids, 1.0)
        job.stores[0].write_many([WriteRequest(table, ids[:7], rows_of(table, ids[:7], 2.0)) for table in (1, 0)])
        job.stores[0].write_many([])
        job.write(ids[:0], 3.0)
        assert holds(job.stores[0], ids[7:], 1.0)
    with make_store(SCHEMA, name) as store:
        assert holds(store, ids[:7], 2.0)
        assert holds(store, ids[:7], 2.0, table=1)
        assert (store.ids(0) == ids).all()


def check_a_fenced_off_writer_changes_nothing(make_store: MakeStore) -> None:
    """A fenced-off writer changes neither rows nor logs and creates no bucket, however often it tries."""
    name, old, new = new_name(), ids_of((0, 40)), ids_of((1_000, 1_400))
    with simulated_job(make_store, name, 1) as zombie:
        zombie.write(old, 1.0)
        with simulated_job(make_store, name, 2, checkpoint_id="m:1") as job:
            before = job.ledger.state()
            for _ in range(2):
                raises(FencedError, lambda: zombie.write(old, 9.0))
                raises(FencedError, lambda: zombie.write(new, 9.0))
                raises(FencedError, lambda: zombie.write(new, 9.0, table=1))
                raises(FencedError, zombie.stores[0].rotate)
            assert holds(job.stores[0], old, 1.0)
            assert not job.stores[0].read(0, new).found.any()
            assert (job.stores[0].ids(0) == old).all()
            assert len(job.stores[0].ids(1)) == 0
            assert job.ledger.state() == before
            job.write(new, 2.0)
            job.write(old[:3], 2.0)
            raises(FencedError, lambda: zombie.write(old, 9.0))
            assert holds(job.stores[0], np.concatenate([new, old[:3]]), 2.0)
            assert holds(job.stores[0], old[3:], 1.0)


def check_a_fenced_off_job_cannot_administer(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 40))
    with simulated_job(make_store, name, 1) as zombie:
        zombie.write(ids, 1.0)
        with simulated_job(make_store, name, 2, checkpoint_id="m:1") as job:
            job.write(ids[:5], 2.0)
            before = job.ledger.state()
            raises(FencedError, lambda: zombie.ledger.commit("m:9", 5))
            raises(FencedError, lambda: zombie.ledger.begin("m:9", 1))
            raises(FencedError, lambda: zombie.ledger.invalidate("x"))
            raises(FencedError, zombie.ledger.inspect)
            raises(FencedError, lambda: zombie.ledger.delete(np.zeros(len(ids), np.uint32), ids))
            raises(FencedError, lambda: drop_all(zombie.ledger))
            assert job.ledger.state() == before
            job.ledger.inspect()


def check_a_ledger_without_a_token(make_store: MakeStore) -> None:
    """A ledger without a token can be read. It acts for its store's writer if the store has a fence."""
    name = new_name()
    with simulated_job(make_store, name, 1, writers=2) as job:
        with unfenced(make_store, name) as (_, ledger):
            raises(StoreError, lambda: ledger.invalidate("x"))
            raises(StoreError, lambda: ledger.commit("m:1", 1))
            ledger.inspect()
        assert {state.checkpoint_id for state in job.ledger.state()} == {"m:0"}
        with job.stores[1].ledger() as ledger:
            ledger.inspect()
            ledger.invalidate("x")
        assert {state.checkpoint_id for state in job.ledger.state()} == {"x"}


def check_state_is_read_only(make_store: MakeStore) -> None:
    name = new_name()
    with unfenced(make_store, name) as (store, ledger):
        for _ in range(2):
            states = ledger.state()
            assert len(states) == ledger.num_buckets
            assert {(state.owner, state.checkpoint_id, state.logs, state.num_rows) for state in states} == {
                ("", "", (), 0)
            }
        assert len(touched_ids(ledger)) == 0
        assert store.check() is False
    with simulated_job(make_store, name, 7, checkpoint_id="m:3", writers=2) as job:
        ids = ids_of((0, 300))
        job.write(ids, 1.0)
        job.write(ids, 1.0, table=1, writer=1)
        with unfenced(make_store, name) as (_, ledger):
            states = ledger.state()
            assert states == ledger.state() == job.ledger.state()
        assert {(state.owner, state.checkpoint_id) for state in states} == {(job.token, "m:3")}
        num_rows = np.zeros(job.ledger.num_buckets, np.int64)
        for table in (0, 1):
            buckets = bucket_of(np.full(1, table, np.uint32), ids, job.ledger.num_buckets)
            num_rows += np.bincount(buckets, minlength=job.ledger.num_buckets)
        assert [state.num_rows for state in states] == num_rows.tolist()
        for state in states:
            assert [(log.token, log.epoch, log.writer) for log in state.logs] == [(job.token, 1, 0), (job.token, 1, 1)]


def check_rotation_counts_the_groups_of_each_log(make_store: MakeStore) -> None:
    name = new_name()
    with simulated_job(make_store, name, 1, writers=2) as job:
        job.write(ids_of((0, 30)), 1.0)
        job.write(ids_of((5, 6)), 2.0)
        job.write(ids_of((100, 105)), 1.0, writer=1)
        counts = job.rotate()
        for writer in (0, 1):
            assert counts[writer].dtype == np.int64
            assert counts[writer].shape == (job.ledger.num_buckets,)
            logged = [
                log.num_groups
                for state in job.ledger.state()
                for log in state.logs
                if (log.epoch, log.writer) == (1, writer)
            ]
            assert counts[writer].tolist() == logged
        bucket = int(bucket_of(np.zeros(1, np.uint32), np.array([5], np.int64), job.ledger.num_buckets)[0])
        assert counts[0][bucket] == 2
        assert counts[1].sum() <= 5
        assert all(not rotated.any() for rotated in job.rotate()), "epoch 2 was empty"
        for state in job.ledger.state():
            assert {(log.epoch, log.writer) for log in state.logs} == {(e, w) for e in (1, 2, 3) for w in (0, 1)}


def check_touched_rows_are_those_of_uncommitted_epochs(make_store: MakeStore) -> None:
    """Sequence: a job is killed; the second job takes over and is killed during recovery; the third takes over."""
    name = new_name()
    with simulated_job(make_store, name, 1) as job:
        job.write(ids_of((0, 100)), 1.0)
        assert (touched_ids(job.ledger) == ids_of((0, 100))).all()
        job.rotate()
        job.write(ids_of((90, 120)), 2.0)
        job.ledger.commit("m:1", 1)
        assert (touched_ids(job.ledger) == ids_of((90, 120))).all()
        assert {state.checkpoint_id for state in job.ledger.state()} == {"m:1"}
        job.rotate()
        job.write(ids_of((110, 130)), 3.0)
        job.write(ids_of((7, 8)), 3.0, table=1)
    with unfenced(make_store, name) as (store, ledger):
        ledger.acquire(new_token(2))
        assert (touched_ids(ledger) == ids_of((90, 130))).all()
        token = ledger.state()[0].owner
        store.fence(Fence(token=token, writer=0, epoch=0))
        store.write(0, ids_of((90, 93)), rows_of(0, ids_of((90, 93)), 1.0))
        store.write(0, ids_of((500, 510)), rows_of(0, ids_of((500, 510)), 1.0))
        assert (touched_ids(ledger) == ids_of((90, 130), (500, 510))).all()
    token = new_token(3)
    with unfenced(make_store, name) as (store, ledger):
        ledger.acquire(token)
        assert (touched_ids(ledger) == ids_of((90, 130), (500, 510))).all()
        assert (touched_ids(ledger, table=1) == [7]).all()
        assert {state.checkpoint_id for state in ledger.state()} == {"m:1"}
        ledger.begin("m:1", 2)
        assert len(touched_ids(ledger)) == 0
        for state in ledger.state():
            assert state.logs == tuple(LogState(token=token, epoch=1, writer=writer, num_groups=0) for writer in (0, 1))
        assert holds(store, ids_of((90, 93), (500, 510)), 1.0)


def check_logs_of_another_job_keep_their_length(make_store: MakeStore) -> None:
    """Recovery uses the log length to tell whether the interval that ended at a checkpoint is complete."""
    name, token = new_name(), new_token(2)
    with simulated_job(make_store, name, 1, writers=2) as job:
        job.write(ids_of((0, 100)), 1.0)
        job.write(ids_of((200, 210)), 1.0, writer=1)
        counts = job.rotate()
        old = job.token
    with unfenced(make_store, name) as (_, ledger):
        before = ledger.state()
        for _ in range(2):
            ledger.acquire(token)
        for bucket, (was, state) in enumerate(zip(before, ledger.state(), strict=True)):
            assert state.owner == token
            assert state.checkpoint_id == "m:0"
            assert state.num_rows == was.num_rows
            found = {(log.token, log.epoch, log.writer): log.num_groups for log in state.logs}
            assert found == {
                (token, 0, 0): 0,
                **{(old, 1, writer): counts[writer][bucket] for writer in (0, 1)},
                **{(old, 2, writer): 0 for writer in (0, 1)},
            }


def check_a_commit_leaves_later_epochs_and_other_jobs(make_store: MakeStore) -> None:
    name = new_name()
    with simulated_job(make_store, name, 1) as job:
        job.write(ids_of((0, 10)), 1.0)
        job.rotate()
        job.write(ids_of((10, 20)), 1.0)
        job.rotate()
        for _ in range(2):
            job.ledger.commit("m:5", 1)
            assert (touched_ids(job.ledger) == ids_of((10, 20))).all()
        job.write(ids_of((20, 30)), 1.0)
        job.ledger.commit("m:6", 2)
        assert (touched_ids(job.ledger) == ids_of((20, 30))).all()
        (epoch,) = {log.epoch for state in job.ledger.state() for log in state.logs}
        assert epoch == 3
        assert holds(job.stores[0], ids_of((0, 30)), 1.0)


def check_calls_may_be_repeated(make_store: MakeStore) -> None:
    name, token, ids = new_name(), new_token(3), ids_of((0, 50))
    with unfenced(make_store, name) as (store, ledger):
        for _ in range(2):
            ledger.acquire(token)
        store.fence(Fence(token=token, writer=0, epoch=0))
        store.write(0, ids, rows_of(0, ids, 1.0))
        ledger.acquire(token)
        assert (touched_ids(ledger) == ids).all(), "acquiring again forgot what was written since"
        for _ in range(2):
            ledger.delete(np.zeros(3, np.uint32), ids[:3])
        num_groups = store.rotate()
        for _ in range(2):
            ledger.begin("m:1", 1, num_groups=num_groups.tolist())
        store.fence(Fence(token=token, writer=0, epoch=1))
        store.write(0, ids[5:9], rows_of(0, ids[5:9], 2.0))
        ledger.begin("m:1", 1, num_groups=num_groups.tolist())
        assert (touched_ids(ledger) == ids[5:9]).all(), "what came after the beginning is gone"
        for _ in range(2):
            ledger.invalidate("x")
        assert {state.checkpoint_id for state in ledger.state()} == {"x"}
        assert (store.ids(0) == ids[3:]).all()


def check_begin_rejects_wrong_counts(make_store: MakeStore) -> None:
    """A starting job is rejected if the written rows or the expected rows do not match the ledger."""
    name, token, ids = new_name(), new_token(3), ids_of((0, 50))
    with unfenced(make_store, name) as (store, ledger):
        ledger.acquire(token)
        store.fence(Fence(token=token, writer=0, epoch=0))
        store.write(0, ids, rows_of(0, ids, 1.0))
        num_rows = [state.num_rows for state in ledger.state()]
        num_groups = store.rotate().tolist()
        raises(RolledBackError, lambda: ledger.begin("m:1", 1))
        more = [number + 1 for number in num_groups]
        raises(RolledBackError, lambda: ledger.begin("m:1", 1, num_groups=more, num_rows=num_rows))
        more = [number + 1 for number in num_rows]
        raises(RolledBackError, lambda: ledger.begin("m:1", 1, num_groups=num_groups, num_rows=more))
        assert all(state.checkpoint_id == "" for state in ledger.state() if state.num_rows)
        ledger.begin("m:1", 1, num_groups=num_groups, num_rows=num_rows)
        assert {state.checkpoint_id for state in ledger.state()} == {"m:1"}


def check_commit_rejects_missing_groups(make_store: MakeStore) -> None:
    """A commit is rejected if a writer's groups of the epoch are missing. A repeated commit compares nothing."""
    name = new_name()
    with simulated_job(make_store, name, 1, writers=2) as job:
        job.write(ids_of((0, 100)), 1.0)
        job.write(ids_of((200, 300)), 1.0, writer=1)
        counts = [groups.tolist() for groups in job.rotate()]
        more = [counts[0], [number + 1 for number in counts[1]]]
        raises(RolledBackError, lambda: job.ledger.commit("m:1", 1, more))
        assert {state.checkpoint_id for state in job.ledger.state()} == {"m:0"}
        for _ in range(2):
            job.ledger.commit("m:1", 1, counts)
        assert {state.checkpoint_id for state in job.ledger.state()} == {"m:1"}
        raises(RolledBackError, lambda: job.ledger.commit("m:2", 1, counts))


def check_invalidation_is_permanent(make_store: MakeStore) -> None:
    """An invalidated namespace stays invalid even if a checkpoint in progress commits afterwards."""
    name = new_name()
    with simulated_job(make_store, name, 1) as job:
        job.write(ids_of((0, 100)), 1.0)
        counts = [groups.tolist() for groups in job.rotate()]
        job.ledger.invalidate(invalidated("m:0"))
        job.ledger.commit("m:1", 1, counts)
        assert {state.checkpoint_id for state in job.ledger.state()} == {invalidated("m:0")}


def check_deleting_and_dropping(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 12_000))
    with simulated_job(make_store, name, 1) as job:
        for table in (0, 1):
            job.write(ids, 1.0, table=table)
        gone = np.random.default_rng(2).permutation(ids)[:10_000]
        job.ledger.delete(np.zeros(len(gone), np.uint32), gone)
        job.ledger.delete(np.zeros(0, np.uint32), gone[:0])
        job.ledger.delete(np.array([1, 0], np.uint32), np.array([5, 99_999], np.int64))
        assert (job.stores[0].ids(0) == np.setdiff1d(ids, gone)).all()
        assert (job.stores[0].ids(1) == ids[ids != 5]).all()
        job.ledger.drop(0)
        for table in (0, 1):
            buckets = bucket_of(np.full(1, table, np.uint32), job.stores[0].ids(table), job.ledger.num_buckets)
            assert (buckets != 0).all()
        drop_all(job.ledger)
        assert sum(state.num_rows for state in job.ledger.state()) == 0
        job.write(ids, 2.0)
        assert holds(job.stores[0], ids, 2.0)


def check_two_writers_of_one_job(make_store: MakeStore) -> None:
    name = new_name()
    shares = [ids_of((writer * 1_000, writer * 1_000 + 500)) for writer in (0, 1)]
    errors: list[BaseException] = []
    with simulated_job(make_store, name, 1, writers=2) as job:
        start = threading.Barrier(2)

        def write(writer: int) -> None:
            try:
                start.wait()
                for part in np.array_split(shares[writer], 20):
                    job.write(part, 1.0, writer=writer)
                job.stores[writer].rotate()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert (touched_ids(job.ledger) == np.concatenate(shares)).all()
        assert holds(job.stores[0], np.concatenate(shares), 1.0)


def check_a_writer_without_an_acquired_token(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 10))
    with make_store(SCHEMA, name) as store:
        store.fence(Fence(token=new_token(1), writer=0, epoch=1))
        raises(StoreError, lambda: store.write(0, ids, rows_of(0, ids, 1.0)))
        assert not store.read(0, ids).found.any()
    with simulated_job(make_store, name, 1, writers=1) as job, make_store(SCHEMA, name) as store:
        store.fence(Fence(token=job.token, writer=1, epoch=1))
        raises(StoreError, lambda: store.write(0, ids, rows_of(0, ids, 1.0)))
        assert not store.read(0, ids).found.any()


def check_invalid_tokens_and_checkpoint_ids(make_store: MakeStore) -> None:
    with unfenced(make_store, new_name()) as (store, ledger):
        raises(ValueError, store.rotate)
        for token in ("", "1", "1-xyz", f"-{'0' * 32}", f"1-{'0' * 32} "):
            raises(ValueError, partial(ledger.acquire, token))
        ledger.acquire(new_token(1))
        raises(ValueError, lambda: ledger.begin("x" * 201, 1))
        raises(ValueError, lambda: ledger.commit("x" * 201, 1))


def check_a_namespace_without_owner(make_store: MakeStore) -> None:
    """A namespace that has lost its owner (as after loss of all data) rejects every ledger operation except `state`."""
    name = new_name()
    with make_store(SCHEMA, name) as store:
        store.fence(Fence(token=new_token(1), writer=0, epoch=1))
        with store.ledger() as ledger:
            raises(RolledBackError, lambda: ledger.invalidate("x"))
            raises(RolledBackError, lambda: ledger.commit("m:1", 1))
            raises(RolledBackError, lambda: ledger.begin("m:1", 1))
            raises(RolledBackError, ledger.inspect)
            assert {(state.owner, state.checkpoint_id) for state in ledger.state()} == {("", "")}


#: All checks, in the order of this file.
FENCE_CHECKS: tuple[Callable[[MakeStore], None], ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("check_")
)
