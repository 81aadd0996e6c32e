"""Insert, evict, flush and update; and training with the cache compared with a plain loop."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.cache.lookup import lookup
from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.cache.slots import FREE
from bagpipe.errors import JobError
from bagpipe.kernels import torch_kernels
from bagpipe.kernels.initialization import TORCH_DTYPE, initial_weights
from bagpipe.kernels.interface import RowNames, RowStep
from bagpipe.kernels.row_format import host_words, open_row_format
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.oracle.plan import FeatureRef, OwnerPlan
from bagpipe.store.interface import ReadResult
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import DictStore, Job, owner_plan, random_batch, row_list
from tests.effort import at_most

CPU, LR, EPS = torch.device("cpu"), 0.1, 1e-6
TABLES = (
    RowTable(name="small", dim=4, init_bound=0.5),
    RowTable(name="odd", dim=5, init_bound=0.2),
    RowTable(name="also odd", dim=5, init_bound=0.1),
    RowTable(name="sequence", dim=8),
)
LOOKUPS = (TableLookup(), TableLookup(pooling="mean"), TableLookup(pooling="mean"), TableLookup(pooling="none"))
FEATURES = tuple(FeatureRef(feature=f, table=t) for f, t in [(0, 0), (1, 0), (0, 1), (2, 2), (3, 3)])
NUM_IDS = (6, 6, 9, 5)
#: Of each table, with the dtype "mixed".
MIXED = ("bfloat16", None, "float16", "bfloat16")


def schema_of(optimizer: str, dtype: str = "float64") -> RowSchema:
    rounding = "stochastic" if dtype in ("bfloat16", "mixed") else "nearest"
    if dtype != "mixed":
        return RowSchema(tables=TABLES, optimizer=optimizer, dtype=dtype, seed=11, rounding=rounding)
    tables = tuple(dataclasses.replace(table, dtype=own) for table, own in zip(TABLES, MIXED, strict=True))
    return RowSchema(tables=tables, optimizer=optimizer, dtype="float32", seed=11, rounding=rounding)


def batches(count: int, seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        random_batch(rng, index=index, num_examples=5, num_ids=NUM_IDS, max_length=3, weighted=False)
        for index in range(count)
    ]


def loss_of(vectors: Sequence[Tensor]) -> Tensor:
    """Non-linear, so that the gradient of every batch depends on the rows."""
    return torch.stack([(part * (1 + part)).sum() for part in vectors]).sum()


def train(job: Job, data: Sequence[Batch]) -> list[float]:
    losses = []
    for context in job.steps(data):
        current = job.cache.current
        assert current is not None
        loss = loss_of([lookup(group) for group in current.groups])
        loss.backward()
        job.cache.update(context, RowStep(lr=LR, eps=EPS, step=context.batch_index + 1))
        losses.append(loss.item())
    return losses


def new_job(
    optimizer: str, dtype: str = "float64", num_slots: int = 0, lookups: Sequence[TableLookup] = LOOKUPS
) -> Job:
    schema = schema_of(optimizer, dtype)
    return Job(RowCache(schema, num_slots), DictStore(schema), build_layout(schema.tables, FEATURES, lookups))


# ---- against a plain loop --------------------------------------------------------------------------------------------


def plain_vectors(weights: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    starts = batch.feature_offsets()
    out = []
    for ref in FEATURES:
        ids = torch.from_numpy(batch.values[starts[ref.feature] : starts[ref.feature + 1]])
        if LOOKUPS[ref.table].pooling == "none":
            out.append(nn.functional.embedding(ids, weights[ref.table], sparse=True))
            continue
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths[ref.feature])]))
        pooling = LOOKUPS[ref.table].pooling
        out.append(
            nn.functional.embedding_bag(
                ids, weights[ref.table], ends, mode=pooling, sparse=True, include_last_offset=True
            )
        )
    return out


REFERENCES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=LR),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=LR, eps=EPS),
    "adam": lambda weights: torch.optim.SparseAdam(weights, lr=LR, eps=EPS),
}


@pytest.mark.parametrize("optimizer", list(REFERENCES))
def test_training_equals_a_plain_loop(optimizer: str) -> None:
    """Eight batches of multi-hot, empty bags, a feature in two tables, a table with two features: 1e-12 in float64."""
    data = batches(8)
    job = new_job(optimizer)
    losses = train(job, data)
    schema = job.cache.schema
    limit = max(NUM_IDS)
    weights = [
        nn.Parameter(initial_weights(table, np.arange(limit), seed=schema.seed, dtype="float64")) for table in TABLES
    ]
    reference = REFERENCES[optimizer](list(weights))
    for batch, loss in zip(data, losses, strict=True):
        reference.zero_grad()
        expected = loss_of(plain_vectors(weights, batch))
        expected.backward()
        reference.step()
        assert loss == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    rows = job.finish()
    assert len(rows) > 20
    for (table, row_id), record in rows.items():
        expected_row = weights[table][row_id].detach().numpy()
        np.testing.assert_allclose(record[: TABLES[table].dim], expected_row, rtol=1e-12, atol=1e-12)


def plain_half_rows(schema: RowSchema, data: Sequence[Batch]) -> dict[tuple[int, int], bytes]:
    """Reference records after training on sums of rows, row by row: float32 values, rounded after each batch."""
    formats = [open_row_format(schema, CPU, schema.dtype_of(table)) for table in range(len(TABLES))]
    rows: dict[tuple[int, int], Tensor] = {}
    for batch in data:
        starts = batch.feature_offsets()
        totals: dict[tuple[int, int], Tensor] = {}
        for ref in FEATURES:
            dim = TABLES[ref.table].dim
            ids = batch.values[starts[ref.feature] : starts[ref.feature + 1]].tolist()
            lengths = batch.lengths[ref.feature].tolist()
            if ref.table == 3:
                lengths = [1] * len(ids)  # a sequence: each id is a vector
            for row_id in ids:
                if (ref.table, row_id) not in rows:
                    row = torch.zeros(1, schema.row_width(ref.table), dtype=TORCH_DTYPE[schema.dtype_of(ref.table)])
                    start = initial_weights(TABLES[ref.table], np.array([row_id]), seed=schema.seed)
                    row[:, :dim] = start.to(row.dtype)
                    rows[ref.table, row_id] = row
            place = 0
            for length in lengths:
                bag, place = ids[place : place + length], place + length
                vector = torch.zeros(dim)
                for row_id in bag:
                    vector = vector + rows[ref.table, row_id][0, :dim].float()
                vector.requires_grad_()
                loss_of([vector]).backward()
                for row_id in bag:
                    total = totals.setdefault((ref.table, row_id), torch.zeros(1, dim))
                    total += vector.grad
        for (table, row_id), gradient in totals.items():
            row, dim, row_format = rows[table, row_id], TABLES[table].dim, formats[table]
            values = row_format.unpack(row, dim)
            ROW_OPTIMIZERS[schema.optimizer].apply(values, gradient, RowStep(lr=LR, eps=EPS, step=batch.index + 1))
            names = RowNames(tables=torch.tensor([table], dtype=torch.int32), ids=torch.tensor([row_id]))
            row_format.pack(values, row, dim, names, batch.index + 1)
    return {key: host_words(row).tobytes() for key, row in rows.items()}


@pytest.mark.parametrize("optimizer", list(ROW_OPTIMIZERS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed"])
def test_training_half_rows_equals_a_plain_loop_that_rounds(optimizer: str, dtype: str) -> None:
    """Same bits with float16 rounded to nearest and bfloat16 stochastically, for odd dimensions too."""
    data = batches(3)
    job = new_job(optimizer, dtype, lookups=(*[TableLookup()] * 3, TableLookup(pooling="none")))
    train(job, data)
    rows = {key: record.tobytes() for key, record in job.finish().items()}
    assert rows == plain_half_rows(job.cache.schema, data)


# ---- equal bits for any slots ----------------------------------------------------------------------------------------


@at_most(15)
@given(
    optimizer=st.sampled_from(list(ROW_OPTIMIZERS)),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16", "mixed"]),
    slot_seed=st.integers(0, 2**32),
    num_slots=st.sampled_from([0, 60, 200]),
    num_spare_slots=st.integers(0, 30),
    chunk_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_same_bits_for_any_slots(
    optimizer: str, dtype: str, slot_seed: int, num_slots: int, num_spare_slots: int, chunk_bytes: int
) -> None:
    data = batches(5)
    expected_job = new_job(optimizer, dtype)
    expected_losses = train(expected_job, data)
    expected = expected_job.finish()
    job = new_job(optimizer, dtype, num_slots)
    job.seed, job.num_spare_slots = slot_seed, num_spare_slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernels, "UPDATE_CHUNK_BYTES", chunk_bytes)
        assert train(job, data) == expected_losses
    rows = job.finish()
    assert rows.keys() == expected.keys()
    for key, record in rows.items():
        assert record.tobytes() == expected[key].tobytes()


def test_insert_during_the_computation_of_a_batch() -> None:
    """Another thread inserts rows of the next batch during forward, backward and update of this one."""
    entering = row_list([np.arange(100, 500), *[np.zeros(0, dtype=np.int64)] * 3])
    data = random_batch(np.random.default_rng(1), num_examples=30, num_ids=(40, 40, 1, 1), max_length=2)
    records = []
    for threaded in (False, True):
        job = new_job("adagrad", num_slots=600)
        cache = job.cache
        context = next(job.steps([data]))
        free = np.flatnonzero(cache.slots.slot_table == FREE).astype(np.int32)[-400:]
        owner = owner_plan(entering, free, row_list([np.zeros(0, dtype=np.int64)] * 4), free[:0])
        requests = FetchRequests.of(owner, skip_new=False)
        results = job.store.read_many(requests.reads)
        start = threading.Barrier(2 if threaded else 1)

        def insert(
            start: threading.Barrier = start,
            cache: RowCache = cache,
            owner: OwnerPlan = owner,
            requests: FetchRequests = requests,
            results: list[ReadResult] = results,
        ) -> None:
            start.wait()
            cache.insert(owner, requests, results)

        with ThreadPoolExecutor(1) as pool:
            inserting = pool.submit(insert)
            if threaded:
                start.wait()
            else:
                inserting.result()
            assert cache.current is not None
            loss_of([lookup(group) for group in cache.current.groups]).backward()
            cache.update(context, RowStep(lr=LR, eps=EPS, step=1))
            inserting.result()
        cache.slots.check(entering, free)
        cache.slots.mark_dirty(free)
        records.append({key: row.tobytes() for key, row in job.finish().items()})
    assert records[0] == records[1]


# ---- lanes -----------------------------------------------------------------------------------------------------------


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


NONE = row_list([ids()] * 4)
NO_SLOTS = np.zeros(0, dtype=np.int32)


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def slots_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_insert_stored_missing_and_new_rows() -> None:
    """Rows found in the store keep their record; rows not found or not read get initial values."""
    cache = RowCache(schema_of("adagrad"), 8)
    fetch = row_list([ids(1, 2, 3), ids(1), ids(), ids()])
    owner = owner_plan(fetch, slots_of(5, 0, 3, 6), NONE, NO_SLOTS, new=np.array([True, False, False, False]))
    requests = FetchRequests.of(owner, skip_new=True)
    assert [(table, asked.tolist()) for table, asked in requests.reads] == [(0, [2, 3]), (1, [1])]
    stored = np.arange(16, dtype=np.float64).reshape(2, 8)
    results = [
        ReadResult(stored, np.array([False, True]), words(0, 33)),
        ReadResult(np.full((1, 10), 7.0), np.array([True]), words(44)),
    ]
    cache.insert(owner, requests, results)
    cache.slots.check(fetch, owner.fetch_slots)
    cache.slots.mark_dirty(owner.fetch_slots)
    (requests_out,) = cache.flush()
    small, odd = requests_out
    assert (small.table, small.ids.tolist(), odd.table, odd.ids.tolist()) == (0, [1, 2, 3], 1, [1])
    replaced = [request.replaced for request in requests_out]
    assert [None if part is None else part.tolist() for part in replaced] == [[0, 0, 33], [44]]
    initial = initial_weights(TABLES[0], ids(1, 2), seed=11, dtype="float64").numpy()
    np.testing.assert_array_equal(small.rows[:2], np.concatenate([initial, np.zeros((2, 4))], axis=1))
    np.testing.assert_array_equal(small.rows[2], stored[1])
    np.testing.assert_array_equal(odd.rows, np.full((1, 10), 7.0))
    statistics = cache.statistics()
    assert (statistics.inserted, statistics.initialised, statistics.resident) == (4, 2, 4)
    assert [(table, asked.tolist()) for table, asked in FetchRequests.of(owner, skip_new=False).reads] == [
        (0, [1, 2, 3]),
        (1, [1]),
    ]


def test_insert_wants_all_answers() -> None:
    cache = RowCache(schema_of("sgd"), 8)
    owner = owner_plan(row_list([ids(1, 2), ids(), ids(), ids()]), slots_of(0, 1), NONE, NO_SLOTS)
    with pytest.raises(JobError, match="fetches 2 rows from the store, 0 were read"):
        cache.insert(owner, FetchRequests.of(owner, skip_new=False), [])
    assert cache.statistics().resident == 0


def test_evict_writes_dirty_rows_only() -> None:
    cache = RowCache(schema_of("sgd"), 8)
    rows = row_list([ids(1, 2), ids(9), ids(), ids(4)])
    owner = owner_plan(rows, slots_of(1, 2, 3, 4), NONE, NO_SLOTS, new=np.ones(4, dtype=np.bool_))
    cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
    cache.slots.mark_dirty(slots_of(2, 4))
    leaving = owner_plan(NONE, NO_SLOTS, rows, slots_of(1, 2, 3, 4))
    requests = cache.evict(leaving)
    assert [(request.table, request.ids.tolist()) for request in requests] == [(0, [2]), (3, [4])]
    np.testing.assert_array_equal(
        requests[0].rows, initial_weights(TABLES[0], ids(2), seed=11, dtype="float64").numpy()
    )
    statistics = cache.statistics()
    assert (statistics.resident, statistics.evicted, statistics.evicted_dirty) == (0, 4, 2)
    with pytest.raises(JobError, match="slot 1 was planned to hold table 0 id 1, but holds nothing"):
        cache.evict(leaving)


def test_evaluation_never_dirties() -> None:
    job = new_job("adam")
    for _ in job.steps(batches(3)):
        assert job.cache.current is not None
        with torch.no_grad():
            loss_of([lookup(group) for group in job.cache.current.groups])
    statistics = job.cache.statistics()
    assert (statistics.dirty, statistics.evicted_dirty, statistics.updated) == (0, 0, 0)
    assert job.finish() == {}
    job.cache.clear()
    assert job.cache.statistics().resident == 0


def test_only_rows_with_gradients_are_updated() -> None:
    """As in torch: a parameter without a gradient stays unchanged."""
    job = new_job("adam")
    (context,) = (step for step in job.steps(batches(1)))
    assert job.cache.current is not None
    lookup(job.cache.current.groups[0]).sum().backward()
    job.cache.update(context, RowStep(lr=LR, eps=EPS, step=1))
    assert {table for table, _ in job.finish()} == {0}


def test_flush_keeps_rows_dirty_until_they_are_written() -> None:
    cache = RowCache(schema_of("sgd"), 8)
    rows = row_list([ids(5, 3, 4), ids(), ids(), ids()])
    owner = owner_plan(rows, slots_of(1, 0, 7), NONE, NO_SLOTS, new=np.ones(3, dtype=np.bool_))
    cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
    cache.slots.mark_dirty(owner.fetch_slots)
    chunks = cache.flush(chunk_rows=2)
    assert [request.ids.tolist() for request in next(chunks)] == [[3, 4]]
    assert cache.statistics().dirty == 3
    assert [request.ids.tolist() for request in next(chunks)] == [[5]]
    assert cache.statistics().dirty == 1
    chunks.close()  # the write failed
    assert cache.statistics().dirty == 1
    with pytest.raises(JobError, match="1 updated rows would be lost"):
        cache.clear()
    assert [[request.ids.tolist() for request in chunk] for chunk in cache.flush()] == [[[5]]]
    assert cache.statistics().resident == 3


def test_fixed_cache_does_not_grow() -> None:
    cache = RowCache(schema_of("sgd"), 2)
    owner = owner_plan(row_list([ids(1), ids(), ids(), ids()]), slots_of(2), NONE, NO_SLOTS)
    with pytest.raises(JobError, match="the plan uses 3 slots, the cache has 2"):
        cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])


def test_begin_and_update_must_match() -> None:
    job = new_job("sgd")
    contexts = []
    for context in job.steps(batches(2)):
        contexts.append(context)
    with pytest.raises(JobError, match="update of batch 0, but the batch begun is 1"):
        job.cache.update(contexts[0], RowStep(lr=LR, eps=EPS, step=1))
    job.cache.update(contexts[1], RowStep(lr=LR, eps=EPS, step=1))
    with pytest.raises(JobError, match="update of batch 1, but the batch begun is none"):
        job.cache.update(contexts[1], RowStep(lr=LR, eps=EPS, step=1))
    with pytest.raises(JobError, match="was planned to hold table"):
        job.cache.check(contexts[0])
