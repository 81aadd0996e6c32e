"""Conformance checks of embedding stores, independent of a test framework.

    check_store(make_store)              all checks
    for check in CHECKS: check(make)     one by one, for a test per check

`make_store(schema, namespace)` returns a store, not entered. Two stores of one namespace see the same rows. A namespace
never used before is empty. Checks generate their own names.
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import Rows, Store, WriteRequest
from bagpipe.store.row_checksum import table_check_words
from bagpipe.testing.delete_conformance import DELETE_CHECKS
from bagpipe.testing.fence_conformance import FENCE_CHECKS
from bagpipe.testing.namespace_conformance import NAMESPACE_CHECKS
from bagpipe.types.schema import RowSchema, RowTable

__all__ = ["CHECKS", "MakeStore", "check_store"]

MakeStore = Callable[[RowSchema, str], Store]

_SCHEMA = RowSchema(
    tables=(RowTable(name="small", dim=3), RowTable(name="wide", dim=64), RowTable(name="also small", dim=3)),
    optimizer="rowwise_adagrad",
    seed=5,
)
_INT64 = np.iinfo(np.int64)


def check_store(make_store: MakeStore) -> None:
    """Run every check.

    Raises:
        AssertionError: the store violates the interface; the traceback names the check.
    """
    for check in CHECKS:
        check(make_store)


def _new_name() -> str:
    return f"conformance-{uuid.uuid4().hex}"


def _open(make_store: MakeStore, schema: RowSchema = _SCHEMA) -> Store:
    return make_store(schema, _new_name())


def _rows(schema: RowSchema, table: int, ids: NDArray[np.int64], salt: int = 0) -> Rows:
    """Rows that differ in every element and include special floating-point values."""
    rng = np.random.default_rng([salt, table, len(ids)])
    shape = (len(ids), schema.row_width(table))
    row_type = schema.row_type_of(table)
    if row_type.is_half:
        return rng.integers(0, 1 << 16, shape, np.dtype(row_type.word))
    rows = rng.standard_normal(shape).astype(schema.dtype_of(table))
    rows.ravel()[: 5 * len(ids) : 5] = np.resize(
        [0.0, -0.0, np.inf, -np.inf, 1e-40], len(rows.ravel()[: 5 * len(ids) : 5])
    )
    return rows


def _same_bits(left: Rows, right: Rows) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def _raises(kind: type[Exception], call: Callable[[], object], *words: str) -> None:
    message = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"expected {kind.__name__}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{message} does not say {missing}"
    assert "\n" not in message, f"more than one line: {message}"


def check_a_row_never_written_is_not_found(make_store: MakeStore) -> None:
    with _open(make_store) as store:
        result = store.read(1, np.array([0, -1, 7], np.int64))
        assert not result.found.any()
        assert _same_bits(result.rows, np.zeros((3, 65), np.float32))
        assert len(store.ids(1)) == 0


def check_rows_come_back_bit_for_bit(make_store: MakeStore) -> None:
    for dtype, other in (("float32", "float16"), ("float64", "float64"), ("bfloat16", "float32")):
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
            own = [RowTable(name=f"own {dim}", dim=dim, optimizer="frozen", dtype=other) for dim in (8, 16)]
            schema = RowSchema(tables=(*_SCHEMA.tables, *own), optimizer=optimizer, dtype=dtype)
            ids = np.array([3, 1, 2**40, 0], np.int64)
            with _open(make_store, schema) as store:
                store.write_many([WriteRequest(table, ids, _rows(schema, table, ids)) for table in range(5)])
                for table, result in enumerate(store.read_many([(table, ids) for table in range(5)])):
                    assert result.found.all()
                    assert _same_bits(result.rows, _rows(schema, table, ids))


def check_rows_come_in_the_order_asked_for(make_store: MakeStore) -> None:
    ids = np.arange(100, dtype=np.int64)
    rows = _rows(_SCHEMA, 0, ids)
    with _open(make_store) as store:
        store.write(0, ids, rows)
        order = np.random.default_rng(1).permutation(100)
        assert _same_bits(store.read(0, ids[order]).rows, rows[order])
        assert _same_bits(store.read(0, np.repeat(ids, 3)).rows, np.repeat(rows, 3, axis=0))


def check_missing_rows_among_found_ones(make_store: MakeStore) -> None:
    ids = np.arange(1000, dtype=np.int64)
    written = np.random.default_rng(2).random(1000) < 0.6
    with _open(make_store) as store:
        store.write(1, ids[written], _rows(_SCHEMA, 1, ids)[written])
        result = store.read(1, ids)
        assert (result.found == written).all()
        assert _same_bits(result.rows, np.where(written[:, None], _rows(_SCHEMA, 1, ids), np.float32(0)))


def check_rows_that_look_like_the_protocol(make_store: MakeStore) -> None:
    ids = np.arange(300, dtype=np.int64)
    raw = np.random.default_rng(3).integers(0, 256, (150, 260)).astype(np.uint8)
    for position, text in ((7, b"\r\n$-1\r\n"), (100, b"$-1\r\n$260\r\n"), (250, b"\r\n$260\r\n")):
        raw[:, position : position + len(text)] = np.frombuffer(text, np.uint8)
    rows = raw.view(np.float32)
    with _open(make_store) as store:
        store.write(1, ids[::2], rows)
        result = store.read(1, ids)
        assert (result.found == (ids % 2 == 0)).all()
        assert _same_bits(result.rows[::2], rows)


def check_extreme_ids(make_store: MakeStore) -> None:
    ids = np.array([_INT64.min, -2, -1, 0, 1, 2**32, _INT64.max], np.int64)
    with _open(make_store) as store:
        store.write(2, ids, _rows(_SCHEMA, 2, ids))
        assert _same_bits(store.read(2, ids[::-1]).rows, _rows(_SCHEMA, 2, ids)[::-1])
        assert (store.ids(2) == ids).all()


def check_tables_do_not_mix(make_store: MakeStore) -> None:
    ids = np.arange(50, dtype=np.int64)
    with _open(make_store) as store:
        store.write(0, ids, _rows(_SCHEMA, 0, ids))
        assert not store.read(2, ids).found.any()
        assert not store.read(1, ids).found.any()
        assert len(store.ids(2)) == 0


def check_overwriting_replaces_the_row(make_store: MakeStore) -> None:
    ids = np.arange(20, dtype=np.int64)
    with _open(make_store) as store:
        store.write(0, ids, _rows(_SCHEMA, 0, ids))
        store.write(0, ids[5:10], _rows(_SCHEMA, 0, ids[5:10], salt=1))
        expected = _rows(_SCHEMA, 0, ids)
        expected[5:10] = _rows(_SCHEMA, 0, ids[5:10], salt=1)
        assert _same_bits(store.read(0, ids).rows, expected)


def check_writing_twice_changes_nothing(make_store: MakeStore) -> None:
    ids = np.arange(20, dtype=np.int64)
    requests = [WriteRequest(table, ids, _rows(_SCHEMA, table, ids)) for table in range(3)]
    with _open(make_store) as store:
        store.write_many(requests)
        store.write_many(requests)
        for request in requests:
            assert _same_bits(store.read(request.table, ids).rows, request.rows)
            assert (store.ids(request.table) == ids).all()


def check_many_tables_in_one_exchange(make_store: MakeStore) -> None:
    ids = [np.arange(start, 200, dtype=np.int64) for start in (0, 50, 199)]
    order = (1, 0, 2, 1)
    with _open(make_store) as store:
        store.write_many([WriteRequest(table, ids[table], _rows(_SCHEMA, table, ids[table])) for table in (2, 0, 1)])
        results = store.read_many([(table, ids[table]) for table in order])
        assert len(results) == 4
        for table, result in zip(order, results, strict=True):
            assert result.found.all()
            assert _same_bits(result.rows, _rows(_SCHEMA, table, ids[table]))


def check_empty_requests(make_store: MakeStore) -> None:
    none = np.empty(0, np.int64)
    some = np.array([4], np.int64)
    with _open(make_store) as store:
        assert store.read_many([]) == []
        store.write_many([])
        store.write(0, none, np.empty((0, 4), np.float32))
        store.write_many(
            [WriteRequest(0, none, np.empty((0, 4), np.float32)), WriteRequest(1, some, _rows(_SCHEMA, 1, some))]
        )
        empty, one = store.read_many([(0, none), (1, some)])
        assert empty.rows.shape == (0, 4)
        assert empty.rows.dtype == np.float32
        assert empty.found.shape == (0,)
        assert one.found.all()
        assert len(store.ids(0)) == 0


def check_a_large_batch(make_store: MakeStore) -> None:
    ids = np.unique(np.random.default_rng(4).integers(_INT64.min, _INT64.max, 30_000))
    rows = _rows(_SCHEMA, 1, ids)
    with _open(make_store) as store:
        store.write(1, ids, rows)
        assert _same_bits(store.read(1, ids).rows, rows)
        assert (store.ids(1) == ids).all()


def check_a_wrong_request_changes_nothing(make_store: MakeStore) -> None:
    ids = np.array([1, 2, 1], np.int64)
    rows = _rows(_SCHEMA, 0, ids)
    good = WriteRequest(0, ids[:2], rows[:2])
    with _open(make_store) as store:
        for bad in (
            WriteRequest(0, ids, rows),  # id 1 twice
            WriteRequest(0, ids[:2], rows),  # more rows than ids
            WriteRequest(0, ids[:2], rows[:2].astype(np.float64)),
            WriteRequest(1, ids[:2], rows[:2]),  # another table's width
            WriteRequest(3, ids[:2], rows[:2]),  # no such table
            WriteRequest(0, ids[:2].astype(np.int32), rows[:2]),
            WriteRequest(0, ids[:2], rows[:2], np.zeros(3, np.uint64)),
            WriteRequest(0, ids[:2], rows[:2], np.zeros(2, np.int64)),
        ):
            _raises(ValueError, functools.partial(store.write_many, [good, bad]))
        assert not store.read(0, ids).found.any()
        _raises(ValueError, lambda: store.read(3, ids))
        _raises(ValueError, lambda: store.read(0, ids.reshape(3, 1)))


def check_arrays_that_are_not_contiguous(make_store: MakeStore) -> None:
    ids = np.arange(40, dtype=np.int64)
    rows = _rows(_SCHEMA, 0, ids)
    with _open(make_store) as store:
        store.write(0, ids[::-2], rows[::-2])
        assert _same_bits(store.read(0, ids[1::2]).rows, rows[1::2])


def check_the_schema_record(make_store: MakeStore) -> None:
    name = _new_name()
    with make_store(_SCHEMA, name) as store:
        assert store.check() is False
        assert store.check() is False, "check must not create the record"
        assert store.claim() is True
        assert store.check() is True
        assert store.claim() is False
    with make_store(_SCHEMA, name) as store:
        assert store.check() is True
        assert store.claim() is False


def check_another_schema_is_refused_with_both_values(make_store: MakeStore) -> None:
    name, tables = _new_name(), _SCHEMA.tables
    with make_store(_SCHEMA, name) as store:
        store.claim()
    small, wide, also_small = tables
    for other, words in (
        (RowSchema(tables=tables, optimizer="adam", seed=5), ("rowwise_adagrad", "adam")),
        (RowSchema(tables=tables, optimizer="rowwise_adagrad", seed=6), ("seed", "5", "6")),
        (RowSchema(tables=tables, optimizer="rowwise_adagrad", seed=5, dtype="float64"), ("float32", "float64")),
        (RowSchema(tables=tables, optimizer="rowwise_adagrad", seed=5, dtype="float16"), ("float32", "float16")),
        (RowSchema(tables=(small, wide), optimizer="rowwise_adagrad", seed=5), ("tables", "also small")),
        (RowSchema(tables=(wide, small, also_small), optimizer="rowwise_adagrad", seed=5), ("tables",)),
        (
            RowSchema(tables=(small, RowTable(name="wide", dim=32), also_small), optimizer="rowwise_adagrad", seed=5),
            ("wide", "dim", "64", "32"),
        ),
        (replace(_SCHEMA, tables=(replace(small, dtype="float16"), wide, also_small)), ("small", "float32", "float16")),
    ):
        with make_store(other, name) as store:
            _raises(InputError, store.check, *words)
            _raises(InputError, store.claim, *words)
    with make_store(_SCHEMA, name) as store:
        assert store.check() is True


def check_one_of_two_claims_wins(make_store: MakeStore) -> None:
    name, start, created = _new_name(), threading.Barrier(2), []
    with make_store(_SCHEMA, name) as one, make_store(_SCHEMA, name) as two:

        def claim(store: Store) -> None:
            start.wait()
            created.append(store.claim())

        threads = [threading.Thread(target=claim, args=(store,)) for store in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(created) == [False, True]


def check_rows_outlive_the_store_object(make_store: MakeStore) -> None:
    name, ids = _new_name(), np.arange(10, dtype=np.int64)
    with make_store(_SCHEMA, name) as store:
        store.claim()
        store.write(0, ids, _rows(_SCHEMA, 0, ids))
    with make_store(_SCHEMA, name) as store:
        assert _same_bits(store.read(0, ids).rows, _rows(_SCHEMA, 0, ids))
    with _open(make_store) as store:
        assert not store.read(0, ids).found.any(), "another namespace sees the rows"


def check_one_thread_reads_while_another_writes(make_store: MakeStore) -> None:
    ids = np.arange(500, dtype=np.int64)
    versions = [np.full((500, 4), version, np.float32) for version in range(20)]
    errors: list[BaseException] = []
    with _open(make_store) as store:
        store.write(0, ids, versions[0])
        start = threading.Barrier(2)

        def write() -> None:
            try:
                start.wait()
                for rows in versions:
                    store.write(0, ids, rows)
            except BaseException as error:
                errors.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        start.wait()
        last = np.zeros(500)
        for _ in range(20):
            result = store.read(0, ids)
            assert result.found.all()
            # Every row is read whole, and its version never goes back.
            assert (result.rows == result.rows[:, :1]).all()
            assert (result.rows[:, 0] >= last).all()
            last = result.rows[:, 0]
        writer.join()
        assert not errors, errors
        assert _same_bits(store.read(0, ids).rows, versions[-1])


def check_statistics_count_rows(make_store: MakeStore) -> None:
    ids = np.arange(30, dtype=np.int64)
    with _open(make_store) as store:
        assert store.statistics().rows_read == 0
        store.write(0, ids[:20], _rows(_SCHEMA, 0, ids[:20]))
        store.read_many([(0, ids), (1, ids)])
        statistics = store.statistics()
        assert (statistics.rows_written, statistics.rows_read, statistics.rows_found) == (20, 60, 20)


def check_words_of_what_is_read(make_store: MakeStore) -> None:
    ids = np.arange(500, dtype=np.int64)
    for dtype in ("float32", "bfloat16"):
        schema = RowSchema(tables=_SCHEMA.tables, optimizer="rowwise_adagrad", dtype=dtype)
        with _open(make_store, schema) as store:
            store.write_many([WriteRequest(table, ids[::2], _rows(schema, table, ids[::2])) for table in range(3)])
            for table, result in zip((1, 0), store.read_many([(1, ids), (0, ids)]), strict=True):
                expected = np.zeros(500, np.uint64)
                expected[::2] = table_check_words(table, ids[::2], _rows(schema, table, ids[::2]))
                assert (result.checks == expected).all()


def check_sums_change_by_what_is_written_and_replaced(make_store: MakeStore) -> None:
    ids = np.arange(3000, dtype=np.int64)
    with _open(make_store) as store:
        new = np.zeros(3000, np.uint64)
        store.write_many([WriteRequest(table, ids, _rows(_SCHEMA, table, ids), new) for table in range(3)])
        assert store.sum_changes().to_list() == stored_sums(store).to_list()
        replaced = store.read(0, ids[::7]).checks
        store.write_many(
            [
                WriteRequest(0, ids[::7], _rows(_SCHEMA, 0, ids[::7], salt=1), replaced),
                WriteRequest(1, ids[:0], np.empty((0, 65), np.float32), new[:0]),
            ]
        )
        assert store.sum_changes().to_list() == stored_sums(store).to_list()
        # Of two requests, only the one that names what it replaces counts.
        expected = store.sum_changes()
        expected.add_rows(np.array([0], np.uint32), ids, store.read(0, ids).checks)
        store.write_many(
            [
                WriteRequest(2, ids, _rows(_SCHEMA, 2, ids, salt=2)),
                WriteRequest(0, ids, store.read(0, ids).rows, new),
            ]
        )
        assert store.sum_changes().to_list() == expected.to_list()


#: All checks, in the order of this file, then those of deletions, of fencing and of namespaces.
CHECKS: tuple[Callable[[MakeStore], None], ...] = (
    *(value for name, value in list(globals().items()) if name.startswith("check_") and name != "check_store"),
    *(DELETE_CHECKS + FENCE_CHECKS + NAMESPACE_CHECKS),
)
