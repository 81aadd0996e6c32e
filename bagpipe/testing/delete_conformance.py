"""Conformance checks of deletions: rows, logs and sums after `Store.delete_many`.

Part of `bagpipe.testing.store_conformance`, which runs these checks with its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import FencedError
from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import DeleteRequest, Store, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.testing.fence_jobs import (
    SCHEMA,
    MakeStore,
    holds,
    ids_of,
    new_name,
    raises,
    rows_of,
    simulated_job,
    touched_ids,
)

__all__ = ["DELETE_CHECKS"]


def _write(store: Store, table: int, ids: NDArray[np.int64], value: float) -> None:
    """Write rows, and name what they replace."""
    replaced = store.read(table, ids).checks
    store.write_many([WriteRequest(table, ids, rows_of(table, ids, value), replaced)])


def _num_rows(store: Store) -> int:
    with store.ledger() as ledger:
        return sum(state.num_rows for state in ledger.state())


def check_deleted_rows_are_not_found(make_store: MakeStore) -> None:
    ids = ids_of((0, 3_000))
    with make_store(SCHEMA, new_name()) as store:
        for table in (0, 1):
            _write(store, table, ids, 1.0)
        store.delete_many([DeleteRequest(1, ids[::3]), DeleteRequest(0, ids[:10][::-1]), DeleteRequest(1, ids[1::3])])
        assert (store.ids(0) == ids[10:]).all()
        assert (store.ids(1) == ids[2::3]).all()
        assert holds(store, ids[10:], 1.0)
        assert holds(store, ids[2::3], 1.0, table=1)
        gone = store.read(1, ids)
        assert (gone.found == (ids % 3 == 2)).all()
        assert not gone.rows[~gone.found].any()
        assert not gone.checks[~gone.found].any()
        assert store.statistics().rows_deleted == 2_010
        assert _num_rows(store) == 3_990
        assert store.sum_changes().to_list() == stored_sums(store).to_list()


def check_deleting_missing_rows(make_store: MakeStore) -> None:
    """They are passed over, alone or among others, in a namespace without any row, and of a table without any."""
    ids = ids_of((0, 100))
    with make_store(SCHEMA, new_name()) as store:
        store.delete_many([])
        store.delete_many([DeleteRequest(0, ids[:0])])
        store.delete_many([DeleteRequest(0, ids), DeleteRequest(1, ids)])
        assert store.statistics().rows_deleted == 0
        _write(store, 0, ids[::2], 1.0)
        for _ in range(2):
            store.delete_many([DeleteRequest(0, ids[:50]), DeleteRequest(1, ids)])
            assert (store.ids(0) == ids[50::2]).all()
            assert store.statistics().rows_deleted == 25
            assert store.sum_changes().to_list() == stored_sums(store).to_list()
        store.delete_many([DeleteRequest(0, ids)])
        assert len(store.ids(0)) == 0
        assert store.sum_changes().to_list() == [0] * store.sum_changes().num_buckets


def check_a_deleted_row_is_written_anew(make_store: MakeStore) -> None:
    ids = ids_of((0, 400))
    with simulated_job(make_store, new_name(), 1) as job:
        store = job.stores[0]
        for value in (1.0, 2.0, 3.0):
            _write(store, 0, ids, value)
            assert holds(store, ids, value)
            job.delete(ids)
            assert len(store.ids(0)) == 0
            _write(store, 0, ids[:7], value)
            assert (store.ids(0) == ids[:7]).all()
            assert store.sum_changes().to_list() == stored_sums(store).to_list()


def check_a_wrong_deletion_changes_nothing(make_store: MakeStore) -> None:
    ids = ids_of((0, 5))
    with make_store(SCHEMA, new_name()) as store:
        store.write(0, ids, rows_of(0, ids, 1.0))
        for bad in (
            DeleteRequest(0, ids[[1, 1]]),
            DeleteRequest(0, ids[4:]),  # named by the other request too
            DeleteRequest(2, ids),  # no such table
            DeleteRequest(1, ids.astype(np.int32)),
            DeleteRequest(1, ids[None]),
        ):
            raises(ValueError, partial(store.delete_many, [DeleteRequest(0, ids), bad]))
        assert holds(store, ids, 1.0)


def check_a_large_deletion(make_store: MakeStore) -> None:
    """More ids than one exchange removes, few of them with rows; then more rows than one command names."""
    ids = np.unique(np.random.default_rng(6).integers(-(2**63), 2**63 - 1, 80_000))
    gone = np.random.default_rng(7).random(len(ids)) < 0.9
    with simulated_job(make_store, new_name(), 1) as job:
        _write(job.stores[0], 0, ids[::16], 1.0)
        job.delete(np.random.default_rng(8).permutation(ids[gone]))
        assert (job.stores[0].ids(0) == ids[::16][~gone[::16]]).all()
        assert (touched_ids(job.ledger) == np.union1d(ids[::16], ids[gone])).all()
        assert job.stores[0].sum_changes().to_list() == stored_sums(job.stores[0]).to_list()
    with make_store(SCHEMA, new_name()) as store:
        store.write(0, ids[:12_000], rows_of(0, ids[:12_000], 1.0))
        store.delete_many([DeleteRequest(0, ids[5:])])
        assert (store.ids(0) == ids[:5]).all()


def check_one_thread_reads_while_another_deletes(make_store: MakeStore) -> None:
    ids, errors = ids_of((0, 500)), list[BaseException]()
    with make_store(SCHEMA, new_name()) as store:
        store.write(0, ids, rows_of(0, ids, 1.0))
        start = threading.Barrier(2)

        def delete() -> None:
            try:
                start.wait()
                for row_id in range(0, 500, 25):
                    store.delete_many([DeleteRequest(0, ids[row_id : row_id + 25])])
            except BaseException as error:
                errors.append(error)

        deleter = threading.Thread(target=delete)
        deleter.start()
        start.wait()
        last = np.ones(500, np.bool_)
        for _ in range(20):
            result = store.read(0, ids)
            assert not (result.found & ~last).any(), "a deleted row came back"
            assert (result.rows == np.where(result.found[:, None], rows_of(0, ids, 1.0), 0)).all()
            last = result.found
        deleter.join()
        assert not errors, errors
        assert not store.read(0, ids).found.any()


# With a fence


def check_a_deletion_is_logged_as_a_write_is(make_store: MakeStore) -> None:
    """The logs name every id asked for, and count one group for each bucket."""
    ids, name = ids_of((0, 300)), new_name()
    with simulated_job(make_store, name, 1, writers=2) as job:
        job.write(ids[:200], 1.0)
        counts = [groups.tolist() for groups in job.rotate()]
        job.ledger.commit("m:1", 1, counts)
        assert len(touched_ids(job.ledger)) == 0
        job.delete(ids[100:250], writer=1)
        assert (touched_ids(job.ledger) == ids[100:250]).all()
        job.delete(ids[:0], writer=1)
        buckets = bucket_of(np.zeros(1, np.uint32), ids[100:250], job.ledger.num_buckets)
        expected = (np.bincount(buckets, minlength=job.ledger.num_buckets) > 0).astype(np.int64)
        rotated = job.rotate()
        assert (rotated[1] == expected).all()
        assert not rotated[0].any()
        job.ledger.commit("m:2", 2, [groups.tolist() for groups in rotated])
        assert len(touched_ids(job.ledger)) == 0
        assert (job.stores[0].ids(0) == ids[:100]).all()


def check_a_fenced_off_writer_deletes_nothing(make_store: MakeStore) -> None:
    """Neither rows nor logs change and no bucket is created, however often it tries."""
    ids, name = ids_of((0, 400)), new_name()
    with simulated_job(make_store, name, 1) as zombie:
        zombie.write(ids, 1.0)
        with simulated_job(make_store, name, 2, checkpoint_id="m:1") as job:
            before = job.ledger.state()
            for _ in range(2):
                raises(FencedError, lambda: zombie.delete(ids))
                raises(FencedError, lambda: zombie.delete(ids, table=1))
                raises(FencedError, lambda: zombie.write(ids, 9.0))
            assert holds(job.stores[0], ids, 1.0)
            assert job.ledger.state() == before
            job.delete(ids[:3])
            assert (job.stores[0].ids(0) == ids[3:]).all()
            assert zombie.stores[0].statistics().rows_deleted == 0


def check_random_changes_of_two_writers(make_store: MakeStore) -> None:
    """Writes and deletions of two writers in turn, compared with a dict; sums of both together."""
    rng, name = np.random.default_rng(11), new_name()
    expected: dict[tuple[int, int], float] = {}
    touched: set[tuple[int, int]] = set()
    with simulated_job(make_store, name, 1, writers=2) as job:
        for step in range(40):
            table, store = int(rng.integers(2)), job.stores[int(rng.integers(2))]
            ids = rng.permutation(60)[: rng.integers(1, 50)].astype(np.int64)
            rows = [(table, row_id) for row_id in ids.tolist()]
            touched.update(rows)
            if rng.random() < 0.5:
                _write(store, table, ids, step)
                expected |= dict.fromkeys(rows, float(step))
            else:
                store.delete_many([DeleteRequest(table, ids)])
                expected = {row: value for row, value in expected.items() if row not in rows}
        for table in (0, 1):
            asked = ids_of((0, 61))
            result = job.stores[0].read(table, asked)
            assert result.found.tolist() == [(table, row_id) in expected for row_id in range(61)]
            values = np.array([expected.get((table, row_id), 0.0) for row_id in range(61)], np.float32)
            assert (result.rows[:, 1] == values).all()
            assert touched_ids(job.ledger, table).tolist() == sorted(row_id for t, row_id in touched if t == table)
        sums = job.stores[0].sum_changes() + job.stores[1].sum_changes()
        assert sums.to_list() == stored_sums(job.stores[0]).to_list()
        assert _num_rows(job.stores[0]) == len(expected)


#: All checks, in the order of this file.
DELETE_CHECKS: tuple[Callable[[MakeStore], None], ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("check_")
)
