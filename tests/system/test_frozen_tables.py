"""Tables whose rows are read and never updated: nothing of them accumulates, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from bagpipe.optim import Adam, Frozen, RowOptimizer
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import local_peers
from bagpipe.testing.plain_job import PlainJob, plan_rank_batches
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.part import Hook, InFlightBatch, LoopPart, LoopRun
from bagpipe.training.row_exchange import ExchangedRows
from tests.system.optimizer_jobs import (
    CACHE_ROWS,
    NAMES,
    ROWS,
    batches,
    initial,
    plain_loop,
    same_as,
    settings_for,
    stored,
    train_ranks,
)

SOME: Mapping[str, RowOptimizer] = {"a": Frozen(), "d": Frozen(), "*": Adam(0.1)}
ALL: Mapping[str, RowOptimizer] = {"*": Frozen()}


class Watch(LoopPart):
    """Notes, right before the rows of a batch are updated: batch, whether a group is frozen, its gradients."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, int]] = []
        self._run: LoopRun

    def start(self, run: LoopRun) -> None:
        self._run = run

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.GRADIENTS, when="after", call=self._note)

    def _note(self, key: OpKey, b: int) -> None:
        groups = self._run.in_flight[b].groups
        self.seen += [(b, group.context.tables.is_frozen, len(group.gradients)) for group in groups]

    def check(self, num_batches: int) -> None:
        """Every batch had groups of both kinds; only those that are not frozen had gradients."""
        assert {(b, is_frozen) for b, is_frozen, _ in self.seen} == {
            (b, is_frozen) for b in range(num_batches) for is_frozen in (False, True)
        }
        assert all(count == (0 if is_frozen else 1) for _, is_frozen, count in self.seen)


def names_of_dirty(job: PlainJob) -> set[str]:
    slots = job.cache.slots
    return {job.rows.tables[number].name for number in slots.slot_table[slots.dirty].tolist()}


def check_stored(job: PlainJob, frozen: set[str]) -> None:
    assert isinstance(job.store, MemoryStore)
    assert {name for name, (ids, _) in stored(job.store).items() if not len(ids)} == frozen


def test_nothing_of_a_frozen_table_accumulates() -> None:
    """Over many batches, through a cache whose rows leave and come back."""
    data, watch = batches(num_batches=60), Watch()
    with PlainJob(settings_for(SOME, cache_rows=CACHE_ROWS)) as job:
        job.engine = job.make_engine(parts=[watch])
        with job.engine.train_in_steps(plan_rank_batches(data, job.spec)) as run:
            while (batch := run.step()) is not None:
                assert batch.groups == ()
                run.rest()
                assert "a" not in names_of_dirty(job)
                assert "d" not in names_of_dirty(job)
            run.end()
        watch.check(len(data))
        statistics = job.cache.statistics()
        assert statistics.evicted > statistics.evicted_dirty > 0
        check_stored(job, {"a", "d"})
        same_as(plain_loop(SOME, data), job)


def test_nothing_of_a_frozen_table_is_sent_back_by_its_users() -> None:
    data = batches(num_batches=20)
    expected = plain_loop(SOME, data)
    watches = [Watch(), Watch()]
    unused = iter(watches)

    def check(job: PlainJob) -> None:
        check_stored(job, {"a", "d"})
        same_as(expected, job)

    train_ranks(SOME, data, 2, check=check, parts=lambda: [next(unused)])
    for watch in watches:
        watch.check(len(data))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_frozen_tables_trains_its_dense_part(world_size: int) -> None:
    data = batches()
    expected = plain_loop(ALL, data)

    def check(job: PlainJob) -> None:
        assert job.cache.statistics().updated == 0
        check_stored(job, set(NAMES))
        same_as(expected, job)

    if world_size == 1:
        with PlainJob(settings_for(ALL, cache_rows=CACHE_ROWS)) as job:
            result = job.train(data)
            assert result.progress.rows_written == 0
            check(job)
            logits, _ = job.score(data[:1])
            torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)
    else:
        train_ranks(ALL, data, world_size, check=check)


def test_frozen_rows_of_the_store_are_read() -> None:
    """Rows that another program has put there, half of the table; the others have their initial values."""
    data = batches()
    weights = [initial(number) for number in range(len(NAMES))]
    ids = np.arange(0, ROWS, 2)
    weights[0][ids] += 0.25
    with PlainJob(settings_for(SOME, cache_rows=CACHE_ROWS)) as job:
        table = [table.name for table in job.rows.tables].index("a")
        before = weights[0][ids].numpy()
        assert job.store.claim()
        job.store.write_many([WriteRequest(table=table, ids=ids, rows=before)])
        job.train(data)
        same_as(plain_loop(SOME, data, weights), job)
        np.testing.assert_array_equal(job.store.read_many([(table, ids)])[0].rows, before)


def test_a_frozen_row_that_the_store_lacks_is_not_lost() -> None:
    """A row that was planned before was written when it left; one of a frozen table was not."""
    peers = local_peers(1)
    with PlainJob(settings_for(SOME, cache_rows=CACHE_ROWS)) as job:
        guard = NonfiniteGuard(job.cache.streams, job.engine.dense)
        rows = ExchangedRows(job.cache, peers[0], row_steps=job.engine.row_steps, guard=guard)
        planned = [RankBatch.of(batch, plan, 0) for batch, plan in plan_batches(batches(num_batches=20), job.spec)]
        answers: dict[bool, set[bool]] = {False: set(), True: set()}
        for batch in planned:
            owner = batch.owner
            in_flight = InFlightBatch(rank_batch=batch, context=None, inputs=None)  # type: ignore[arg-type]
            for number, table in enumerate(job.rows.tables):
                part = slice(int(owner.fetch.table_offsets[number]), int(owner.fetch.table_offsets[number + 1]))
                written = rows.was_written(in_flight, number, owner.fetch.ids[part])
                if table.is_frozen:
                    assert not written.any()
                else:
                    np.testing.assert_array_equal(written, ~owner.fetch_new[part])
                answers[table.is_frozen].update(owner.fetch_new[part].tolist())
        assert answers == {False: {False, True}, True: {False, True}}, "rows of all kinds come and come back"
