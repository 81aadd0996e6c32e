"""Admitted rows against a brute-force count of the log."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.admission import AdmissionRules, RowAdmission
from bagpipe.oracle.plan import RowList
from bagpipe.types.batch import Batch
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, Absent, DataSchema, Feature, Pooling, Table
from tests.oracle.batches import make_batch

Bags = list[list[list[int]]]


def schema_of(rows: int | None = 7, pooling: Pooling = "sum") -> DataSchema:
    """Two features share table a; table b has one."""
    return DataSchema(
        label="label",
        dense=(),
        features=(Feature(name="x", table="a"), Feature(name="y", table="b"), Feature(name="z", table="a")),
        tables=(Table(name="a", rows=rows, pooling=pooling), Table(name="b", rows=7)),
    )


def bags_of(batch: Batch) -> Bags:
    ids, found = iter(batch.values.tolist()), []
    for lengths in batch.lengths.tolist():
        found.append([[next(ids) for _ in range(length)] for length in lengths])
    assert next(ids, None) is None
    return found


logs = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.lists(
            st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=size, max_size=size), min_size=3, max_size=3
        ),
        max_size=10,
    )
)


def brute_force(log: list[Bags], min_uses: dict[str, int], replaced: dict[str, list[int]]) -> list[Bags]:
    """The log with the ids of rows that have too few uses so far replaced by others, or none."""
    tables, uses, found = ("a", "b", "a"), Counter[tuple[str, int]](), []
    for bags in log:
        uses.update((table, i) for table, feature in zip(tables, bags, strict=True) for bag in feature for i in bag)
        found.append(
            [
                [
                    [j for i in bag for j in ([i] if uses[table, i] >= min_uses.get(table, 1) else replaced[table])]
                    for bag in feature
                ]
                for table, feature in zip(tables, bags, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("rows", [7, None])
@pytest.mark.parametrize("absent", ["default", "zero"])
@given(log=logs, min_uses=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(2, 5), min_size=1))
def test_rows_are_admitted_by_the_count_of_the_log(
    rows: int | None, absent: Absent, log: list[Bags], min_uses: dict[str, int]
) -> None:
    admission = RowAdmission(schema_of(rows), AdmissionRules(min_uses=min_uses, absent=absent))
    found = [bags_of(admission.admit(make_batch(index, bags))) for index, bags in enumerate(log)]
    default = UNBOUNDED_DEFAULT_ID if rows is None else rows
    replaced = {"a": [default], "b": [7]} if absent == "default" else {"a": [], "b": []}
    assert found == brute_force(log, min_uses, replaced)


@given(log=logs)
def test_tables_do_not_depend_on_each_other(log: list[Bags]) -> None:
    """So a process that reads some tables' columns admits their rows alone."""
    both = RowAdmission(schema_of(), AdmissionRules(min_uses={"a": 2, "b": 3}))
    alone = RowAdmission(schema_of(), AdmissionRules(min_uses={"b": 3}))
    for index, bags in enumerate(log):
        first, second = (bags_of(each.admit(make_batch(index, bags))) for each in (both, alone))
        assert first[1] == second[1]
        assert second[0] == bags[0]


def test_weights_stay_with_their_ids() -> None:
    admission = RowAdmission(schema_of(), AdmissionRules(min_uses={"a": 2}, absent="zero"))
    batch = dataclasses.replace(
        make_batch(0, [[[1, 2], [2]], [[5], []], [[3, 3], [4]]]), weights=np.arange(7, dtype=np.float32)
    )
    found = admission.admit(batch)
    assert bags_of(found) == [[[2], [2]], [[5], []], [[3, 3], []]]
    assert found.weights is not None
    assert found.weights.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("absent", "values", "next_use"),
    [("default", [4, 4, 7, 5, 7], [6, 9, 4, 6, 4]), ("zero", [4, 4, 5], [6, 9, 6])],
)
def test_next_uses_stay_with_admitted_rows(absent: Absent, values: list[int], next_use: list[int]) -> None:
    batch = dataclasses.replace(
        make_batch(3, [[[4, 4, 3]], [[5]], [[6]]]), next_use=np.array([6, 9, 7, 6, 8], dtype=np.int32)
    )
    found = RowAdmission(schema_of(), AdmissionRules(min_uses={"a": 2}, absent=absent)).admit(batch)
    assert found.values.tolist() == values
    assert found.next_use is not None
    assert found.next_use.dtype == np.int32
    assert found.next_use.tolist() == next_use


def test_a_batch_whose_rows_are_all_admitted_is_not_copied() -> None:
    admission = RowAdmission(schema_of(), AdmissionRules(min_uses={"a": 2}))
    batch = make_batch(0, [[[1]], [[5]], [[1]]])
    assert admission.admit(batch) is batch


@pytest.mark.parametrize(
    ("rows", "id_", "message"),
    [
        (7, 7, r"batch 3, table 'a': expected ids in \[0, 7\), got 7"),
        (7, -1, r"batch 3, table 'a': expected ids in \[0, 7\), got -1"),
        (None, -(1 << 63), r"batch 3, table 'a': id -9223372036854775808 is that of the default row"),
    ],
)
def test_the_id_of_the_default_row_is_refused_in_data(rows: int | None, id_: int, message: str) -> None:
    admission = RowAdmission(schema_of(rows), AdmissionRules(min_uses={"a": 2}))
    batch = make_batch(3, [[[1]], [[5]], [[id_]]])
    for take in (admission.check, admission.admit):
        with pytest.raises(InputError, match=message):
            take(batch)


def test_the_schema_says_what_absent_rows_read() -> None:
    schema = AdmissionRules(min_uses={"a": 2}).schema(schema_of())
    assert [(table.absent, table.rows, table.num_ids) for table in schema.tables] == [
        ("default", 7, 8),
        ("initial", 7, 7),
    ]


def test_refused_schemas() -> None:
    with pytest.raises(InputError, match=r"data.min_uses_by_table names table 'c', the data has a, b"):
        AdmissionRules(min_uses={"c": 2}).schema(schema_of())
    with pytest.raises(InputError, match="table 'a' must be sum-pooled, got mean: use trained"):
        AdmissionRules(min_uses={"a": 2}, absent="zero").schema(schema_of(pooling="mean"))


@pytest.mark.parametrize("cells", [0, 64])
@pytest.mark.parametrize("rows", [7, None])
def test_rows_that_are_there_are_admitted(rows: int | None, cells: int) -> None:
    """Their first use is that of a row that has enough. Those of other tables, and default rows, are none of theirs."""
    default = UNBOUNDED_DEFAULT_ID if rows is None else rows
    admission = RowAdmission(schema_of(rows), AdmissionRules(min_uses={"a": 3}, sketch_cells=cells))
    admission.know(RowList(table_offsets=np.array([0, 3, 5]), ids=np.array([2, 5, default, 1, 6])))
    batch = admission.admit(make_batch(0, [[[2, 3]], [[4]], [[5, 1]]]))
    assert bags_of(batch) == [[[2, default]], [[4]], [[5, default]]]
    if not cells:
        admission.forget(RowList(table_offsets=np.array([0, 1, 1]), ids=np.array([2])))
        assert bags_of(admission.admit(make_batch(1, [[[2]], [[4]], [[5]]]))) == [[[default]], [[4]], [[5]]]
