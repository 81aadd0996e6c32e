"""Known production bugs of prefetching trainers, seeded into the real engine: each is detected.

From TorchRec and FBGEMM, by issue (#) or pull request (PR). docs/races.md describes each and its prevention here.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from bagpipe.cache import snapshot
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.cache.staging import Area, StagingRing
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.plan import CachePlan, OwnerPlan
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.oracle.verify import PlanError, verify
from bagpipe.pipeline import stream
from bagpipe.testing.local_peers import local_peers
from bagpipe.testing.plain_job import PlainJob, plan_rank_batches
from bagpipe.training.engine import Engine
from bagpipe.training.evaluation import Scoring
from bagpipe.training.reading import Reading
from bagpipe.training.rows import LocalRows
from tests.harness.races.device import ModelledStream
from tests.harness.races.jobs import MissingWait, batches, settings
from tests.harness.races.ranks import run_two_ranks
from tests.harness.races.watch import Watch, watch

NUM_BATCHES = 5


def without_wait(lane: str, source: str) -> Callable[[Engine], None]:
    """Remove a lane's wait for another lane."""

    def change(engine: Engine) -> None:
        engine.cache.streams = MissingWait(engine.cache.streams, lane, source)

    return change


def trained(
    change: Callable[[Engine], None] = lambda engine: None,
    change_batches: Callable[[Iterator[RankBatch]], Iterator[RankBatch]] = lambda steps: steps,
    **values: object,
) -> Watch:
    with watch() as found, PlainJob(settings(**values)) as job:
        change(job.engine)
        job.engine.train(change_batches(plan_rank_batches(batches(NUM_BATCHES), job.spec)))
    return found


def scored(num_batches: int = NUM_BATCHES, change: Callable[[Engine], None] = lambda engine: None) -> Watch:
    with watch() as found, PlainJob(settings()) as job:
        change(job.engine)
        job.engine.evaluate(plan_rank_batches(batches(num_batches), job.spec), lambda logits, labels: None)
    return found


def trained_by_two(change: Callable[[Engine], None] = lambda engine: None) -> Watch:
    with watch() as found:
        run_two_ranks(settings(), NUM_BATCHES, change=change)
    return found


def pairs(found: Watch) -> set[tuple[str, str]]:
    return {race.actions for race in found.races if not race.is_reuse}


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_eviction_of_rows_in_use() -> None:
    """#1201 and the first bug of PR 1893: a prefetch reuses the slots of rows in use."""
    assert {("0X_UPDATE", "0X_EVICT"), ("0X_UPDATE", "0X_INSERT")} <= pairs(trained(without_wait("copy", "compute")))
    assert ("0F", "0X_INSERT") in pairs(scored(change=without_wait("copy", "compute")))


def test_a_plan_that_evicts_rows_in_use_is_rejected() -> None:
    def hasty(steps: Iterator[RankBatch]) -> Iterator[RankBatch]:
        for step in steps:
            yield dataclasses.replace(step, owner=dataclasses.replace(step.owner, evict_after=-1))

    error: Exception | None = None
    with watch() as found, PlainJob(settings()) as job:
        try:
            job.engine.train(hasty(plan_rank_batches(batches(NUM_BATCHES), job.spec)))
        except (JobError, ValueError) as caught:  # the slot table detects it if the other lane is faster
            error = caught
    assert found.races or "slot" in str(error) or "shape mismatch" in str(error)


def test_rows_are_read_before_their_transfer_is_done() -> None:
    """The second bug of PR 1893: the compute lane uses rows whose transfer is not finished."""
    assert {("0X_INSERT", "0F"), ("0X_INSERT", "0X_UPDATE"), ("0X_READ", "0F")} <= pairs(
        trained(without_wait("compute", "copy"))
    )


def test_a_fetch_does_not_wait_for_the_write_back() -> None:
    """The same bug in the store, invisible to streams: the plan checker rejects a plan without the wait."""

    def hasty(plan: CachePlan) -> CachePlan:
        return dataclasses.replace(
            plan, owners=tuple(dataclasses.replace(owner, fetch_after=-1) for owner in plan.owners)
        )

    with PlainJob(settings(cache_rows=0)) as job:
        planned = list(plan_batches(batches(NUM_BATCHES), job.spec))
        assert verify(planned, job.spec).num_batches == NUM_BATCHES
        with pytest.raises(PlanError, match="version 0 instead of 1"):
            verify([(batch, hasty(plan)) for batch, plan in planned], job.spec)


def test_evicted_rows_are_fetched_with_their_update() -> None:
    """PR 2963: a row evicted for one batch and needed by the next is fetched with its update."""
    digests = []
    for cache_rows in (24, 0, 200):
        with PlainJob(settings(cache_rows=cache_rows)) as job:
            result = job.train(batches(8))
            digests.append(job.digests())
            assert (result.progress.rows_fetched > 0) is (cache_rows < 200)
    assert len(set(digests)) == 1


class _Receiver:
    """Snapshot receiver without copy-on-write."""

    def take_rows(self, rows: object, num_bytes: int) -> None:
        pass

    def take_names(self, tables: object, ids: object, stored_checks: object) -> None:
        pass


@pytest.mark.parametrize("waits", [True, False])
def test_a_checkpoint_copies_rows_whose_slots_are_reassigned(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane copies unused rows for a snapshot while another reassigns their slots."""
    if not waits:
        monkeypatch.setattr(snapshot.RowSnapshot, "_await_copies", lambda self: None)
    with watch() as found, PlainJob(settings()) as job:
        cache, cuda = job.engine.cache, found.cuda
        first, *later = plan_rank_batches(batches(4), job.spec)

        def place(owner: OwnerPlan) -> None:
            cache.evict(owner)
            requests = FetchRequests.of(owner, skip_new=False)
            cache.insert(owner, requests, job.store.read_many(requests.reads))

        compute, copy = cuda.Stream(), cuda.Stream()
        with cuda.stream(copy):
            place(first.owner)
            cache.slots.mark_dirty(first.owner.fetch_slots)
        compute.wait_stream(copy)
        with cuda.stream(compute):
            cache.snapshot.begin(_Receiver())
            cache.snapshot.drain(len(cache.slots))
        with cuda.stream(copy):
            for step in later:
                place(step.owner)
    operators = {(race.first.operator, race.second.operator) for race in found.races}
    assert operators == (set() if waits else {("aten::index_select", "aten::index_copy_")})


# ---- fences between lanes -------------------------------------------------------------------------------------------

#: (lane, lane it does not wait for) -> resulting race.
FENCES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("pull", "copy"): ("0X_INSERT", "0X_PREPULL"),
    ("pull", "compute"): ("0X_UPDATE", "0X_PULL"),
    ("pull", "push"): ("0X_UPDATE_LATE", "0X_PREPULL"),
    ("compute", "pull"): ("0X_READ", "0F"),
    ("compute", "push"): ("0X_PUSH", "0X_UPDATE"),
    ("push", "compute"): ("0B", "0X_PUSH"),
}


@pytest.mark.parametrize(("lane", "source"), FENCES)
def test_a_fence_is_missing(lane: str, source: str) -> None:
    """torchrec PR 4191: no fence between the prefetch and the exchange with other ranks."""
    assert FENCES[lane, source] in pairs(trained_by_two(without_wait(lane, source)))


# ---- buffers --------------------------------------------------------------------------------------------------------


def _take_at_once(ring: StagingRing) -> Area:
    """`StagingRing.take` without the wait for the area's event."""
    number, ring._next = ring._next, (ring._next + 1) % len(ring._areas)
    area = ring._areas[number]
    if area is None or len(area) < ring._area_bytes:
        ring._areas[number] = area = Area(ring._streams.memory(ring._area_bytes))
    return area


def _shorten(ring: StagingRing) -> Area:
    ring._areas = ring._areas[:1]
    ring._next = 0
    return _take_at_once(ring)


@pytest.mark.parametrize(("take", "is_race"), [(_take_at_once, False), (_shorten, True)])
def test_a_staging_area_is_filled_while_it_is_copied(
    take: Callable[[StagingRing], Area], is_race: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PR 5512: one buffer where two are needed. The schedule's rings are long enough that their events never block."""
    monkeypatch.setattr(StagingRing, "take", take)
    same_lane = {("0X_READ", "0X_READ"), ("0X_INSERT", "0X_INSERT"), ("0X_EVICT", "0X_EVICT")}
    assert pairs(trained()) == (same_lane if is_race else set())


def test_one_buffer_for_all_evicted_rows() -> None:
    """The same bug for evicted rows: the next eviction overwrites rows that are still being stored."""

    def change(engine: Engine) -> None:
        memory = engine.cache.streams.memory
        kept = memory(1 << 16)

        def the_same(num_bytes: int) -> Any:
            is_rows = 8 < num_bytes <= 1 << 16  # numbers of a batch are smaller, staging areas larger
            return kept[:num_bytes] if is_rows else memory(num_bytes)

        engine.cache.streams.memory = the_same  # type: ignore[method-assign]

    assert {("0X_WRITEBACK", "0X_EVICT"), ("0X_EVICT", "0X_WRITEBACK")} & pairs(trained(change))


def test_a_batch_is_dropped_while_the_device_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's memory belongs to the data lane's stream, whose next batch can reuse it."""
    score, read = Scoring.forward, Reading.read
    enqueued = threading.Semaphore(1)

    def read_next(part: Reading, b: int) -> None:
        assert enqueued.acquire(timeout=30)  # in host order, after the previous batch was dropped
        read(part, b)

    def score_and_drop(part: Scoring, b: int) -> None:
        score(part, b)
        batch: Any = part._run.in_flight[b]
        lookups: Any = next(other for other in part._run.parts if isinstance(other, LocalRows))
        batch.context = batch.inputs = lookups._cache.current = None
        batch.groups = ()
        enqueued.release()

    monkeypatch.setattr(Reading, "read", read_next)
    monkeypatch.setattr(Scoring, "forward", score_and_drop)
    assert {race.actions for race in scored().races if race.is_reuse} == {("0F", "0X_READ")}


def test_gradients_are_freed_while_another_lane_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "keep_for_current_stream", lambda tensor: None)
    with watch() as found:
        stream._KEEP["cpu"] = lambda tensor: None
        run_two_ranks(settings(), NUM_BATCHES)
    assert {race.actions[0] for race in found.races if race.is_reuse} == {"0X_PUSH_LATE"}


@pytest.mark.parametrize("waits", [True, False])
def test_dense_gradients_are_summed_beside_the_backward(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum runs on its own stream between two waits. (On a CPU it is a thread.)"""
    if not waits:
        monkeypatch.setattr(ModelledStream, "wait_stream", lambda stream, other: None)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch() as found:
        sums = DenseParallel(model, local_peers(1)[0].dense)
        sums._lane._stream = found.cuda.Stream()
        with found.cuda.stream(found.cuda.Stream()), sums:
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
                sums.reduce()
                optimizer.step()
                optimizer.zero_grad()
    assert bool(found.races) is not waits


# ---- the host -------------------------------------------------------------------------------------------------------


def test_a_lane_waits_for_its_device() -> None:
    """PR 6192: reading one number from the device stops enqueueing ahead."""

    def change(engine: Engine) -> None:
        inner = engine.dense.optimizer.step

        def step() -> None:
            inner()
            assert float(sum(parameter.detach().sum() for parameter in engine.dense.model.parameters())) < 1e9

        engine.dense.optimizer.step = step  # type: ignore[assignment, method-assign]

    waits = trained(change).history.host_waits
    assert [(name, place.action) for name, place in waits] == [
        ("aten::_local_scalar_dense", f"0OPT{b}") for b in range(NUM_BATCHES)
    ]


def test_a_forward_without_a_backward_leaks_nothing() -> None:
    """PR 6120: a forward must release what it locks. Nothing is locked here; live objects do not grow with batches."""
    alive = []
    with watch() as found, PlainJob(settings()) as job:
        for count in (8, 16):
            job.engine.evaluate(plan_rank_batches(batches(count), job.spec), lambda logits, labels: None)
            assert job.engine.cache.current is None
            gc.collect()
            alive.append(len(found.history.memory))
    assert alive[0] == alive[1]


def test_batches_in_memory_are_bounded_by_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrec PR 1859: prefetching held eight to nine times the input."""
    flights: list[int] = []
    read = Reading.read

    def count(part: Reading, b: int) -> None:
        read(part, b)
        flights.append(len(part._run.in_flight))

    monkeypatch.setattr(Reading, "read", count)
    trained()
    assert max(flights) <= settings().read_ahead + 1 + 4  # and those being written back, at most `WRITE_DEPTH`


def test_the_context_of_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrec PR 3870: training with another batch's context, visible only in the loss."""
    begin = RowCache.begin
    before: list[Any] = []

    def late(cache: RowCache, context: Any, weights: Any = None, **more: Any) -> Any:
        before.append(context)
        return begin(cache, before[max(0, len(before) - 2)], weights, **more)

    monkeypatch.setattr(RowCache, "begin", late)
    keeps_all = settings(cache_rows=200)
    with PlainJob(keeps_all) as job, pytest.raises(InputError, match="which is none of the batch's"):
        job.train(batches(NUM_BATCHES))
    before.clear()
    equal = [dataclasses.replace(batches(1)[0], index=b) for b in range(NUM_BATCHES)]  # ids fit another's context
    with PlainJob(keeps_all) as job, pytest.raises(JobError, match="update of batch 1, but the batch begun is 0"):
        job.train(equal)
