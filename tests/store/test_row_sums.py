from __future__ import annotations

import uuid

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.row_checksum import table_check_words
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema, RowTable
from bagpipe.types.splitmix64 import mix

NUM_ROWS = 2
SCHEMA = RowSchema(tables=(RowTable(name="t", dim=1), RowTable(name="u", dim=1)), optimizer="sgd")

#: A row, and what happens to it: by the job, or (the last two) by another program.
STEPS = st.lists(
    st.tuples(st.integers(0, NUM_ROWS - 1), st.sampled_from(["train", "fetch", "write", "drop", "set back", "remove"])),
    min_size=4,
    max_size=40,
)


@given(STEPS, st.randoms(use_true_random=False))
def test_sums_agree_if_and_only_if_every_row_was_the_last_one_written(steps, random) -> None:
    """Each row has new values only, is fetched before each write, and counts once if it is dropped unchanged."""
    name, next_value = uuid.uuid4().hex, 1.0
    ids = [np.array([row], np.int64) for row in range(NUM_ROWS)]
    with MemoryStore(SCHEMA, name=name, num_buckets=2) as store, MemoryStore(SCHEMA, name=name, num_buckets=2) as other:
        last: dict[int, float] = {}  # the value the job wrote last
        history: dict[int, list[float]] = {row: [] for row in range(NUM_ROWS)}
        held: dict[int, tuple[np.uint64, bool]] = {}  # fetched: its check word, and whether it was the last one written
        is_right = True
        for row, step in steps:
            found = store.read(0, ids[row])
            if step in ("fetch", "train") and row not in held:
                value = float(found.rows[0, 0]) if found.found[0] else None
                held[row] = (found.checks[0], value == last.get(row))
            if step == "drop":
                held.pop(row, None)
            elif step in ("write", "train") and row in held:
                replaced, was_last = held.pop(row)
                is_right &= was_last
                rows = np.full((1, 1), next_value, np.float32)
                store.write_many([WriteRequest(0, ids[row], rows, np.array([replaced]))])
                last[row] = next_value
                history[row].append(next_value)
                next_value += 1
            elif step == "set back" and history[row] and row not in held:
                other.write(0, ids[row], np.full((1, 1), random.choice(history[row]), np.float32))
            elif step == "remove" and history[row] and row not in held:
                remove(other, ids[row])
        for row in range(NUM_ROWS):
            found = store.read(0, ids[row])
            is_right &= (float(found.rows[0, 0]) if found.found[0] else None) == last.get(row)
        assert (len(stored_sums(store).differing(store.sum_changes())) == 0) == is_right


def remove(store: MemoryStore, ids: np.ndarray) -> None:
    with store.ledger() as ledger:
        ledger.acquire("1-" + "0" * 32)
        ledger.delete(np.zeros(1, np.uint32), ids)


def test_words_are_added_to_the_buckets_of_their_rows() -> None:
    sums, ids = RowSums(8), np.arange(100, dtype=np.int64)
    words = np.arange(100, dtype=np.uint64) << np.uint64(57)
    sums.add_rows(np.array([3], np.uint32), ids, words)
    buckets = bucket_of(np.array([3], np.uint32), ids, 8)
    mixed = mix(words.copy())
    assert sums.to_list() == [sum(mixed[buckets == bucket].tolist()) % 2**64 for bucket in range(8)]
    # A row that replaces itself changes nothing, one that replaces nothing is added, and one that leaves is removed.
    for words_now, words_before, expected in (
        (words, words, sums.to_list()),
        (words, words * 0, (sums + sums).to_list()),
        (words * 0, words, sums.to_list()),
    ):
        sums.replace_rows(np.array([3], np.uint32), ids, words_now, words_before)
        assert sums.to_list() == expected


def test_errors_of_rows_at_equal_distances_do_not_cancel() -> None:
    """The words of 2.0, 3.0 and 4.0 are at equal distances: lost are the outer two, taken twice is the middle one."""
    table, ids = np.zeros(1, np.uint32), np.zeros(2, np.int64)
    first, second, third = table_check_words(0, np.zeros(3, np.int64), np.array([[2], [3], [4]], np.float32))
    outer, middle = np.array([first, third]), np.array([second, second])
    assert outer.sum() == middle.sum()
    lost, taken = RowSums(1), RowSums(1)
    lost.add_rows(table, ids, outer)
    taken.add_rows(table, ids, middle)
    assert lost.to_list() != taken.to_list()


def test_sums_are_modulo_2_to_the_64() -> None:
    first, second = RowSums.of([2**64 - 1, 5]), RowSums.of([3, 2**64 + 7])
    assert (first + second).to_list() == [2, 12]
    assert (second - first).to_list() == [4, 2]
    assert first.differing(RowSums.of([-1, 6])).tolist() == [1]


def test_a_copy_does_not_change() -> None:
    sums = RowSums(1)
    copy = sums.copy()
    sums.add_rows(np.zeros(1, np.uint32), np.zeros(1, np.int64), np.ones(1, np.uint64))
    assert sums.to_list() != [0]
    assert copy.to_list() == [0]
