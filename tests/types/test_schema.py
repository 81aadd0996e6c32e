"""Schemas: invalid values, the JSON round trip, and the width of a stored row."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.types.schema import (
    FROZEN,
    OPTIMIZER_STATE_WIDTH,
    ROUNDINGS,
    ROW_TYPES,
    DataSchema,
    Feature,
    RowSchema,
    RowTable,
    Table,
    base_optimizer,
)

names = st.text(min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"rows": 0}, "table 't': rows must be at least 1, got 0"),
        ({"hash": True}, "table 't': hash needs rows, the number of buckets to hash into"),
        ({"dim": 0}, "table 't': dim must be at least 1, got 0"),
        ({"pooling": "max"}, "table 't': pooling must be sum, mean or none, got 'max'"),
    ],
)
def test_an_invalid_table_is_refused(arguments, line):
    with pytest.raises(InputError) as caught:
        Table(name="t", **arguments)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dense": ("a", "b", "a")}, "dense column names must be unique, 'a' appears more than once"),
        ({"tables": (Table(name="t"), Table(name="t"))}, "table names must be unique, 't' appears more than once"),
        ({"features": (Feature(name="f", table="u"),)}, "feature 'f' names table 'u', known tables: ['t']"),
    ],
)
def test_a_data_schema_that_contradicts_itself_is_refused(changes, line):
    good = {"label": "y", "dense": ("a",), "features": (Feature(name="f", table="t"),), "tables": (Table(name="t"),)}
    with pytest.raises(InputError) as caught:
        DataSchema(**{**good, **changes})
    assert str(caught.value) == line


@given(
    label=names,
    dense=st.lists(names, unique=True, max_size=4),
    tables=st.lists(names, unique=True, min_size=1, max_size=4),
    data=st.data(),
)
def test_a_data_schema_round_trips_through_json(label, dense, tables, data):
    features = data.draw(st.lists(names, unique=True, max_size=4))
    schema = DataSchema(
        label=label,
        dense=tuple(dense),
        features=tuple(Feature(name=name, table=data.draw(st.sampled_from(tables))) for name in features),
        tables=tuple(Table(name=name, rows=data.draw(st.none() | st.integers(1, 2**40))) for name in tables),
    )
    assert DataSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    for table in schema.tables:
        assert schema.table(table.name) is table


@pytest.mark.parametrize(("optimizer", "width"), [("sgd", 16), ("adagrad", 32), ("rowwise_adagrad", 17), ("adam", 48)])
def test_the_width_of_a_row(optimizer, width):
    schema = RowSchema(tables=(RowTable(name="t", dim=16),), optimizer=optimizer)
    assert schema.row_width(0) == width
    assert schema.row_bytes(0) == 4 * width


PLAIN = {name for name in OPTIMIZER_STATE_WIDTH if not base_optimizer(name)[1]}


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZER_STATE_WIDTH} - PLAIN))
def test_rows_that_decay_are_not_halves(optimizer):
    table = RowTable(name="t", dim=4)
    schema = RowSchema(tables=(table,), optimizer=optimizer)
    assert RowSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    with pytest.raises(InputError, match=r"^table 't' has rows of bfloat16 that decay: expected float32 or float64"):
        RowSchema(tables=(table,), optimizer=optimizer, dtype="bfloat16")


@given(
    tables=st.lists(names, unique=True, min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(PLAIN - {FROZEN})),
    named=st.lists(st.none() | st.sampled_from(sorted(PLAIN)), min_size=4, max_size=4),
    dtype=st.sampled_from(sorted(ROW_TYPES)),
    rounding=st.sampled_from(ROUNDINGS),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_row_schema_round_trips_through_json_with_its_digest(tables, optimizer, named, dtype, rounding, seed):
    schema = RowSchema(
        tables=tuple(
            RowTable(name=name, dim=4, init_bound=0.1, optimizer=own) for name, own in zip(tables, named, strict=False)
        ),
        optimizer=optimizer,
        dtype=dtype,
        seed=seed,
        rounding=rounding if ROW_TYPES[dtype].is_half else "nearest",
    )
    again = RowSchema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    assert again.digest() == schema.digest()


def test_everything_that_fixes_a_rows_bytes_is_in_the_digest():
    tables = (RowTable(name="t", dim=4),)
    schemas = [
        RowSchema(tables=tables, optimizer="sgd"),
        RowSchema(tables=tables, optimizer="adam"),
        RowSchema(tables=tables, optimizer="sgd", dtype="float64"),
        RowSchema(tables=tables, optimizer="sgd", dtype="float16"),
        RowSchema(tables=tables, optimizer="sgd", dtype="bfloat16"),
        RowSchema(tables=tables, optimizer="sgd", dtype="bfloat16", rounding="stochastic"),
        RowSchema(tables=tables, optimizer="sgd", seed=1),
        RowSchema(tables=(RowTable(name="t", dim=8),), optimizer="sgd"),
        RowSchema(tables=(RowTable(name="u", dim=4),), optimizer="sgd"),
        RowSchema(tables=(RowTable(name="t", dim=4, init_bound=0.1),), optimizer="sgd"),
        RowSchema(tables=(RowTable(name="t", dim=4, optimizer="adam"),), optimizer="sgd"),
        RowSchema(tables=(RowTable(name="t", dim=4, optimizer="frozen"),), optimizer="sgd"),
    ]
    assert len({schema.digest() for schema in schemas}) == len(schemas)


def test_the_digest_of_float32_rows_is_unchanged():
    schema = RowSchema(tables=(RowTable(name="t", dim=4, rows=10),), optimizer="adam", seed=3)
    assert schema.digest() == "914c24279b7a298fb13cf68c2d6f7c2fb59d5740fbf07005d5db574e38001b5a"


@pytest.mark.parametrize(
    ("dtype", "dim", "row_bytes"),
    [
        # sgd, rowwise_adagrad, adagrad, adam
        ("float32", 48, [192, 196, 384, 576]),
        ("float64", 48, [384, 392, 768, 1152]),
        ("float16", 48, [96, 100, 288, 480]),
        ("bfloat16", 48, [96, 100, 288, 480]),
        ("bfloat16", 1, [4, 8, 8, 12]),  # padding of one half after an odd number of weights
    ],
)
def test_bytes_of_a_record(dtype: str, dim: int, row_bytes: list[int]):
    schemas = [
        RowSchema(tables=(RowTable(name="t", dim=dim),), optimizer=optimizer, dtype=dtype)
        for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam")
    ]
    assert [schema.row_bytes(0) for schema in schemas] == row_bytes
    assert all(schema.row_bytes(0) == schema.row_width(0) * schema.row_type.word_bytes for schema in schemas)


def test_each_table_has_the_record_of_its_optimizer():
    tables = (
        RowTable(name="t", dim=6),
        RowTable(name="u", dim=6, optimizer="adam"),
        RowTable(name="v", dim=5, optimizer="frozen"),
    )
    schema = RowSchema(tables=tables, optimizer="rowwise_adagrad")
    assert [schema.optimizer_of(table) for table in range(3)] == ["rowwise_adagrad", "adam", "frozen"]
    assert [schema.row_width(table) for table in range(3)] == [7, 18, 5]
    halves = RowSchema(tables=tables, optimizer="rowwise_adagrad", dtype="float16")
    assert [halves.row_bytes(table) for table in range(3)] == [16, 60, 12]


def test_each_table_has_the_record_of_its_dtype():
    tables = (
        RowTable(name="t", dim=5),
        RowTable(name="u", dim=5, dtype="float16"),
        RowTable(name="v", dim=5, dtype="bfloat16", optimizer="sgd"),
    )
    schema = RowSchema(tables=tables, optimizer="rowwise_adagrad", rounding="stochastic")
    assert [schema.dtype_of(table) for table in range(3)] == ["float32", "float16", "bfloat16"]
    assert schema.dtypes == ("float32", "float16", "bfloat16")
    assert schema.has_half_rows
    assert [schema.row_width(table) for table in range(3)] == [6, 8, 6]
    assert [schema.row_bytes(table) for table in range(3)] == [24, 16, 12]
    assert RowSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert ["dtype" in table for table in schema.to_json()["tables"]] == [False, True, True]


@pytest.mark.parametrize(("dtype", "own"), [("float32", "float64"), ("float64", "float16"), ("bfloat16", "float64")])
def test_float64_is_not_mixed_with_other_dtypes(dtype, own):
    line = (
        f"table 'u' has rows of {own}, other tables rows of {dtype}: expected tables of float64 only, or of float32, "
        "float16 and bfloat16"
    )
    with pytest.raises(InputError) as caught:
        RowSchema(
            tables=(RowTable(name="t", dim=4), RowTable(name="u", dim=4, dtype=own)), optimizer="sgd", dtype=dtype
        )
    assert str(caught.value) == line


def test_an_unknown_dtype_of_a_table_is_refused():
    with pytest.raises(InputError) as caught:
        RowTable(name="t", dim=4, dtype="int8")
    assert str(caught.value) == "table 't': dtype must be one of float32, float64, float16, bfloat16, got 'int8'"


@pytest.mark.parametrize("optimizer", ["lamb", ""])
def test_an_unknown_optimizer_of_a_table_is_refused(optimizer):
    known = "sgd, momentum, adagrad, rowwise_adagrad, adam, ftrl, frozen"
    with pytest.raises(InputError, match=f"^table 't': optimizer must be one of {known}, got '{optimizer}'$"):
        RowTable(name="t", dim=4, optimizer=optimizer)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"optimizer": "frozen"},
            "optim.rows must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, ftrl, got 'frozen'",
        ),
        (
            {"optimizer": "lamb"},
            "optim.rows must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, ftrl, got 'lamb'",
        ),
        ({"dtype": "fp8"}, "row dtype must be one of float32, float64, float16, bfloat16, got 'fp8'"),
        (
            {"dtype": "float16", "rounding": "up"},
            "row rounding must be one of nearest, stochastic, got 'up'",
        ),
        ({"rounding": "stochastic"}, "row rounding must be nearest with rows of float32, got 'stochastic'"),
    ],
)
def test_an_invalid_row_schema_is_refused(arguments, line):
    with pytest.raises(InputError) as caught:
        RowSchema(**{"tables": (RowTable(name="t", dim=4),), "optimizer": "sgd", **arguments})
    assert str(caught.value) == line
