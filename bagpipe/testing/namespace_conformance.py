"""Conformance checks of a namespace's job record and of its removal.

Part of `bagpipe.testing.store_conformance`, which runs these checks with its own.
"""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.errors import FencedError, InputError, StoreError
from bagpipe.store.job_record import JobRecord
from bagpipe.testing.fence_jobs import MakeStore, holds, ids_of, new_name, new_token, raises, simulated_job
from bagpipe.types.schema import RowSchema, RowTable

__all__ = ["NAMESPACE_CHECKS"]


def check_the_job_record_is_the_owners(make_store: MakeStore) -> None:
    name, record = new_name(), JobRecord(job="1" * 32, has_checkpoints=False)
    with simulated_job(make_store, name, 1) as zombie:
        assert zombie.ledger.job() is None
        zombie.ledger.record_job(record)
        with simulated_job(make_store, name, 2) as job:
            raises(FencedError, lambda: zombie.ledger.record_job(record))
            assert job.ledger.job() == record
            ended = JobRecord(job="2" * 32, has_checkpoints=True, state="finished", steps=7, dense_digest="ab")
            for _ in range(2):
                job.ledger.record_job(ended)
            assert zombie.ledger.job() == ended


def check_a_cleared_namespace_is_new(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 400))
    with simulated_job(make_store, name, 1) as job:
        job.stores[0].claim()
        job.write(ids, 1.0)
        job.ledger.record_job(JobRecord(job="1" * 32, has_checkpoints=False))
        job.ledger.clear()
        raises(StoreError, lambda: job.write(ids, 2.0))
        raises(StoreError, job.ledger.clear)
        assert job.stores[0].check() is False
        assert job.ledger.job() is None
        assert {(state.owner, state.checkpoint_id, state.logs, state.num_rows) for state in job.ledger.state()} == {
            ("", "", (), 0)
        }
    with simulated_job(make_store, name, 1) as job:
        assert job.stores[0].claim()
        job.write(ids[:5], 3.0)
        assert (job.stores[0].ids(0) == ids[:5]).all()


def check_a_job_that_was_taken_over_clears_nothing(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 40))
    with simulated_job(make_store, name, 1) as zombie:
        zombie.stores[0].claim()
        zombie.write(ids, 1.0)
        with simulated_job(make_store, name, 2) as job:
            before = job.ledger.state()
            raises(FencedError, zombie.ledger.clear)
            assert job.ledger.state() == before
            assert job.stores[0].check() is True
            assert holds(job.stores[0], ids, 1.0)


def check_a_reset_removes_rows_of_any_schema(make_store: MakeStore) -> None:
    name, ids = new_name(), ids_of((0, 400))
    other = RowSchema(tables=(RowTable(name="other", dim=5),), optimizer="adam", seed=6)
    with simulated_job(make_store, name, 1) as zombie:
        zombie.stores[0].claim()
        zombie.write(ids, 1.0)
        with make_store(other, name) as store:
            raises(InputError, store.check)
            assert store.check(resets=True)
            store.reset(new_token(2))
            assert store.check() is False
            assert store.claim()
            assert len(store.ids(0)) == 0
        raises(StoreError, lambda: zombie.write(ids, 9.0))


#: All checks, in the order of this file.
NAMESPACE_CHECKS: tuple[Callable[[MakeStore], None], ...] = tuple(
    value for name, value in list(globals().items()) if name.startswith("check_")
)
