"""Rows of a cache at rest, found by table and id."""

from __future__ import annotations

import numpy as np

from bagpipe.cache.resident_rows import ResidentRows
from tests.cache.test_row_cache import NUM_IDS, batches, new_job, train


def test_all_rows_of_the_slots_are_found_and_copied() -> None:
    job = new_job("adagrad", "mixed")
    train(job, batches(3))
    slots, resident = job.cache.slots, ResidentRows(job.cache)
    requests, expected = [], {}
    for table, limit in enumerate(NUM_IDS):
        ids = np.random.default_rng(table).permutation(limit + 3)
        at = resident.find(table, ids)
        for row_id, slot in zip(ids.tolist(), at.tolist(), strict=True):
            places = np.flatnonzero((slots.slot_table == table) & (slots.slot_id == row_id)).tolist()
            assert places == ([] if slot < 0 else [slot])
        requests.append((table, ids[at >= 0], at[at >= 0]))
        expected[table] = len(requests[-1][1])
    assert sum(expected.values()) == slots.num_resident > 0
    before = slots.dirty.copy()
    copies = resident.copies(requests)
    assert {table: len(rows) for table, rows in copies.items()} == {t: n for t, n in expected.items() if n}
    for request in next(job.cache.flush(chunk_rows=10_000)):
        places = {row_id: place for place, row_id in enumerate(requests[request.table][1].tolist())}
        for row_id, row in zip(request.ids.tolist(), request.rows, strict=True):
            assert copies[request.table][places[row_id]].tobytes() == row.tobytes()
    assert (slots.dirty == before).all()
    assert ResidentRows(new_job("sgd").cache).copies([]) == {}


def test_rows_that_were_inserted_and_not_trained_are_not_there() -> None:
    """Of the next batch: those that the store had are found, and those that the batch would create are not."""
    job = new_job("adagrad")
    data = batches(2)
    train(job, data[:1])
    job.finish()
    job.cache.clear()
    next(job.steps(data[1:2]))
    slots, resident = job.cache.slots, ResidentRows(job.cache)
    found = {
        (table, row_id)
        for table, limit in enumerate(NUM_IDS)
        for row_id, slot in zip(range(limit), resident.find(table, np.arange(limit)).tolist(), strict=True)
        if slot >= 0
    }
    inserted = set(zip(slots.slot_table.tolist(), slots.slot_id.tolist(), strict=True))
    assert found == inserted & job.store.rows.keys()
    assert 0 < len(found) < slots.num_resident
