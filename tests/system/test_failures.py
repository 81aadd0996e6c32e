"""Capacity errors, failed writes, and bounded memory."""

from __future__ import annotations

import dataclasses
import functools
import re
import resource
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.errors import CapacityError, StoreError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.store.interface import Store
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.training.digest import embedding_digest
from cacher.planning import PlannedData
from tests.system.jobs import change, largest_batch, run_job
from tests.system.streams import FailingStore, ForgetfulStore, fresh_batches
from trainer.assembly import BuiltModel, build_engine, build_training_model

MakeConfig = Callable[..., Config]


def built_model_of(config: Config) -> BuiltModel:
    return build_training_model(config, PlannedData(config.data, config.run.seed).schema)


def unique_rows(config: Config) -> list[int]:
    """Unique rows of every training batch."""
    built = built_model_of(change(config, cache__rows=0))
    batches = PlannedData(config.data, config.run.seed).batches("train", built.spec)
    return [len(batch.consumer.unique) for batch in batches]


def test_a_batch_that_cannot_fit_is_refused_with_the_numbers(clicks: MakeConfig, namespace: str) -> None:
    """A batch inside the first window that does not fit is refused before training, and the store is not claimed."""
    largest = largest_batch(clicks())
    config = change(clicks(), cache__rows=largest - 1, oracle__lookahead=64, store__url=f"memory://{namespace}")
    built = built_model_of(config)
    with MemoryStore(built.rows, name=namespace, num_buckets=8) as store:
        engine = build_engine(built, store)
        result = engine.train(PlannedData(config.data, 0).batches("train", built.spec))
        assert isinstance(result.input_error, CapacityError)
        message = str(result.input_error)
        assert re.search(rf"\bneeds {largest} unique rows\b.*\bcache\.rows is {largest - 1}\b", message), message
        assert "\n" not in message
        assert result.progress.steps == 0
        assert store.check() is False
        assert store.statistics().rows_written == 0


def test_batches_before_one_that_cannot_fit_are_kept(clicks: MakeConfig) -> None:
    """With lookahead 1 the batch is found late: the trained batches are written back, and the error has the numbers."""
    sizes = unique_rows(clicks())
    first_too_large = next(number for number, size in enumerate(sizes) if size > max(sizes[:3]))
    config = change(clicks(), cache__rows=max(sizes[:first_too_large]), oracle__lookahead=1)
    end = run_job(config)
    assert isinstance(end.trained.input_error, CapacityError)
    assert end.trained.progress.steps == first_too_large
    direct = run_job(change(config, cache__rows=0, run__steps=first_too_large))
    assert end.digests == direct.digests


class Failing:
    """Wraps a job's store and keeps a reference to it."""

    def __init__(self, **when: int) -> None:
        self._when = when
        self.store: FailingStore | None = None

    def __call__(self, store: Store) -> Store:
        self.store = FailingStore(store, **self._when)
        return self.store


@pytest.mark.parametrize("mode", ["direct", "cached"])
def test_a_failed_write_stops_the_job(clicks: MakeConfig, mode: str) -> None:
    """Writes fail in any batch and in the final write-back."""
    config = clicks()
    config = change(config, cache__rows=0 if mode == "direct" else largest_batch(config))
    counting = Failing()
    run_job(config, wrap=counting)
    assert counting.store is not None
    num_writes = counting.store.writes
    assert num_writes > 5
    for number in (1, 2, num_writes // 2, num_writes):
        failing = Failing(at_write=number)
        with pytest.raises(StoreError, match=f"write {number} failed") as raised:
            run_job(config, wrap=failing)
        assert "net-out" in "".join(getattr(raised.value, "__notes__", [])) or number == num_writes
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("bagpipe-")]


def test_rows_stay_dirty_until_their_write_is_acknowledged(clicks: MakeConfig) -> None:
    """The last write-back fails at its second chunk: rows of the first chunk are clean, all others still dirty."""
    config = change(clicks(), cache__rows=10_000)
    built = built_model_of(config)
    with MemoryStore(built.rows, num_buckets=8) as inner:
        store = FailingStore(inner, at_write=2)
        engine = build_engine(built, store)
        flush = engine.cache.flush
        engine.cache.flush = functools.partial(flush, chunk_rows=50)  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="write 2 failed"):
            engine.train(PlannedData(config.data, 0).batches("train", built.spec))
        statistics = engine.cache.statistics()
        stored = sum(len(inner.ids(number)) for number in range(len(built.rows.tables)))
        assert stored == 50
        assert statistics.dirty == statistics.resident - 50 > 0
        # No row is lost: a later write-back completes the job.
        for requests in flush():
            inner.write_many(requests)
        assert embedding_digest(inner) == run_job(config).embedding_digest


def test_a_failed_read_stops_the_job(clicks: MakeConfig) -> None:
    config = change(clicks(), cache__rows=largest_batch(clicks()))
    with pytest.raises(StoreError, match="read 2 failed"):
        run_job(config, wrap=Failing(at_read=2))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_the_trainer_s_memory_does_not_grow_with_the_vocabulary(clicks: MakeConfig) -> None:
    """Three million rows of 96 bytes pass through a cache of 30,000 rows: 290 MB if any of them stayed."""
    num_examples, num_features, warmup, count = 2500, 4, 100, 300
    config = change(clicks(), cache__rows=30_000, model__embedding_dim=12, oracle__lookahead=2)
    built = built_model_of(config)
    marks: list[int] = []

    def note(_: object) -> None:
        marks.append(resident_bytes())

    with MemoryStore(built.rows, num_buckets=8) as inner:
        store = ForgetfulStore(inner)
        engine = build_engine(built, store)
        unbounded = dataclasses.replace(built.spec, table_rows=(None,) * len(built.spec.table_rows))
        batches = fresh_batches(count, num_examples=num_examples, num_features=num_features, num_dense=3)
        result = engine.train(plan_rank_batches(batches, unbounded), on_batch=note)
    assert result.progress.rows_unique == count * num_examples * num_features
    assert store.rows_written == count * num_examples * num_features
    grown = max(marks[-20:]) - max(marks[warmup - 20 : warmup])
    assert grown < 32 << 20, f"{grown / 2**20:.0f} MiB more after {count - warmup} further batches"


def test_the_planner_s_memory_does_not_grow_with_the_vocabulary() -> None:
    """The planner holds the window, the cache, and one bit for every existing row."""
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=20_000, lookahead=8)
    size, warmup, count = 5_000, 60, 400
    planner = make_planner(spec)
    tracemalloc.start()
    try:
        used = []
        for batch in fresh_batches(count, num_examples=size, num_features=1):
            planner.push(batch)
            if planner.is_ready:
                planner.plan()
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    new_rows = (count - warmup) * size
    grown = used[-1] - used[warmup]
    # A hash set of one bit per row doubles when it grows, and must distinguish the rows.
    assert grown < new_rows * 2 + (4 << 20), f"{grown / new_rows:.1f} bytes per row"
