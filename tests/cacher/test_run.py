"""One phase of one job without a network: buffers, credits and acknowledgements."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import batches_per_message
from bagpipe.errors import CapacityError, InputError
from cacher.counters import Counters
from cacher.planned_phase import PlannedPhase
from cacher.planning import PlannedData
from cacher.run import Run
from tests.cacher.daemons import config, spec_of

JOB = config(batch_size=20, limit=200)  # 9 batches
DATA = PlannedData(JOB.data, JOB.run.seed)


class Woken:
    """Wakes the threads that wait for a rank's next item."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def __call__(self, rank: int) -> None:
        with self._changed:
            self._changed.notify_all()

    def item(self, run: Run, rank: int, index: int) -> tuple[pb.CacherMessage, bool]:
        with self._changed:
            assert self._changed.wait_for(lambda: run.take(rank, index) is not None, timeout=20)
        found = run.take(rank, index)
        assert found is not None
        return pb.CacherMessage.FromString(found.message), found.is_last


@contextmanager
def started(
    world_size: int = 1, *, credits: int = 2, first_batch: int = 0, rows: int = 5_000
) -> Iterator[tuple[Run, Woken]]:
    woken = Woken()

    def planned() -> PlannedPhase:
        spec = spec_of(config(rows=rows), DATA.schema, world_size)
        return DATA.phase("train", spec, first_batch=first_batch)

    run = Run(
        planned,
        number=4,
        world_size=world_size,
        first_batch=first_batch,
        credits=credits,
        wake=woken,
        counters=Counters(),
    )
    run.start()
    try:
        yield run, woken
    finally:
        run.stop()
        assert run.join(20)


def test_planning_stops_at_the_credits() -> None:
    with started(credits=2) as (run, woken):
        for index in (0, 1):
            message, is_last = woken.item(run, 0, index)
            assert (message.rank_batches[0].run, message.rank_batches[0].index, is_last) == (4, index, False)
        assert run.take(0, 2) is None
        assert run.acknowledge(0, 1)
        assert woken.item(run, 0, 2)[0].rank_batches[0].index == 2
        statistics = run.statistics()
        assert statistics.batches_buffered == (2,)
        assert statistics.credits_free == (0,)
        taken = run.take(0, 1)
        assert taken is not None
        assert (statistics.bytes_buffered, taken.num_batches) == (len(taken.message), 2)


def test_unacknowledged_batches_can_be_read_again() -> None:
    with started(credits=3) as (run, woken):
        first = [woken.item(run, 0, index)[0].rank_batches[0] for index in range(3)]
        assert run.enter(0, credits=3, next_batch=0, watermark=0)
        assert [woken.item(run, 0, index)[0].rank_batches[0] for index in range(3)] == first
        assert run.acknowledge(0, 2)
        assert not run.enter(0, credits=3, next_batch=1, watermark=1)
        assert run.enter(0, credits=3, next_batch=2, watermark=2)


@pytest.mark.parametrize("watermark", [4, 100])
def test_an_acknowledgement_beyond_the_plan_is_refused(watermark: int) -> None:
    with started(credits=2) as (run, woken):
        woken.item(run, 0, 1)
        assert not run.acknowledge(0, watermark)


def test_the_end_comes_after_the_last_batch() -> None:
    with started(credits=20) as (run, woken):
        message, is_last = woken.item(run, 0, 9)
        assert is_last
        assert (message.end.run, message.end.skipped_rows, message.end.next_batch) == (4, 0, 9)
        assert woken.item(run, 0, 8)[0].rank_batches[0].index == 8
        assert not run.has_failed


@pytest.mark.parametrize("credits", [1, 8])
def test_a_run_that_is_stopped_has_no_end(credits: int) -> None:
    """In every state of the planner: a trainer must not take the batches so far for all."""
    with started(credits=credits) as (run, woken):
        woken.item(run, 0, 0)
        run.stop()
        assert run.join(20)
        planned = run.statistics().batches_planned
        assert run.take(0, planned) is None


def test_a_plan_that_ends_before_its_data_has_no_end() -> None:
    """Only the end of the data ends a run, whatever stopped the plan."""

    def planned() -> PlannedPhase:
        phase = DATA.phase("train", spec_of(JOB, DATA.schema))
        phase.stop()
        return phase

    woken = Woken()
    run = Run(planned, number=0, world_size=1, first_batch=0, credits=1, wake=woken, counters=Counters())
    run.start()
    message, _ = woken.item(run, 0, 0)
    assert message.error.kind == "JobError"
    assert message.error.message.endswith("the plan ended at batch 0, before the data")
    assert run.join(20)


def test_errors_keep_their_class() -> None:
    with started(rows=1) as (run, woken):
        message, is_last = woken.item(run, 0, 0)
        assert is_last
        assert message.error.kind == CapacityError.__name__
        assert run.has_failed


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InputError("bad"), "InputError", "bad"),
        (KeyError("defect"), "JobError", "the cacher failed: KeyError: 'defect'"),
    ],
)
def test_a_phase_that_cannot_be_opened(error: Exception, kind: str, words: str) -> None:
    def planned() -> PlannedPhase:
        raise error

    woken = Woken()
    run = Run(planned, number=0, world_size=1, first_batch=0, credits=1, wake=woken, counters=Counters())
    run.start()
    message, _ = woken.item(run, 0, 0)
    assert (message.error.kind, message.error.message) == (kind, words)
    assert run.join(20)


def test_the_last_rank_to_leave_ends_the_run() -> None:
    with started(world_size=2, credits=1) as (run, woken):
        woken.item(run, 1, 0)
        assert not run.leave(0)
        assert run.acknowledge(1, 1)
        assert woken.item(run, 1, 1)[0].rank_batches[0].index == 1  # rank 0 does not block others
        assert run.take(0, 0) is None
        assert run.leave(1)
        assert run.join(20)


def test_a_returning_rank_skips_batches_it_has() -> None:
    with started(credits=2) as (run, woken):
        woken.item(run, 0, 1)
        assert run.enter(0, credits=2, next_batch=6, watermark=5)
        assert woken.item(run, 0, 6)[0].rank_batches[0].index == 6
        assert run.take(0, 5) is None
        assert run.statistics().batches_buffered == (1,)


def test_batches_leave_together_while_the_rank_has_others() -> None:
    """With 8 credits in pairs: a rank that has 7 batches is not sent one more alone, unless the data ends with it."""
    with started(credits=8) as (run, woken):
        woken.item(run, 0, 6)
        assert run.take(0, 7) is None
        assert run.acknowledge(0, 1)
        assert woken.item(run, 0, 7)[0].rank_batches[0].index == 7
        assert woken.item(run, 0, 8)[0].rank_batches[0].index == 8
        taken = run.take(0, 3)
        assert taken is not None
        assert [each.index for each in pb.CacherMessage.FromString(taken.message).rank_batches] == [3, 4, 5, 6, 7, 8]
        assert taken.num_batches == 6


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=12), st.sampled_from([1, 2, 3, 4, 8, 9, 12]))
def test_buffers_are_bounded_and_complete_in_any_order(moves: list[tuple[int, int]], credits: int) -> None:
    """For any order of reads, each rank sees every batch once, and no buffer exceeds the credits.

    A rank acknowledges several batches together, as `Receiver` does, and still never waits for its own acknowledgement.
    """
    together = batches_per_message(credits)
    with started(world_size=2, credits=credits) as (run, woken):
        taken, told = [0, 0], [0, 0]
        for rank, count in moves:
            for _ in range(count):
                if taken[rank] < min(9, min(told) + credits):
                    batches = woken.item(run, rank, taken[rank])[0].rank_batches
                    assert [each.index for each in batches] == [*range(taken[rank], taken[rank] + len(batches))]
                    taken[rank] += len(batches)
                    if taken[rank] - told[rank] >= together:
                        told[rank] = taken[rank]
                        assert run.acknowledge(rank, told[rank])
                assert max(run.statistics().batches_buffered) <= credits
