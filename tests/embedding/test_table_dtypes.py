from __future__ import annotations

from typing import Any

import pytest

from bagpipe.embedding.table_dtypes import TableDtypes
from bagpipe.errors import InputError
from bagpipe.types.schema import RowTable

FULL = {"a": "float32", "b": "float32", "c": "float32"}
MIXED = {"a": "float32", "b": "bfloat16", "c": "bfloat16"}


def dtypes_of(given: Any, configured: dict[str, str], compute: str = "float32") -> tuple[str, list[str | None]]:
    found = TableDtypes.of(given, configured, compute=compute)
    tables = found.named(RowTable(name=name, dim=4) for name in configured)
    return found.shared, [table.dtype for table in tables]


def test_without_row_dtype_tables_have_the_configured_one() -> None:
    assert dtypes_of(None, FULL) == ("float32", [None] * 3)
    assert dtypes_of(None, MIXED) == ("bfloat16", ["float32", None, None])


@pytest.mark.parametrize("given", ["float16", {"*": "float16"}, {"a": "float16", "b": "float16", "c": "float16"}])
def test_one_dtype_is_that_of_the_schema(given: Any) -> None:
    """However it is given: the digest of the row schema is that of a job whose schema names it."""
    assert dtypes_of(given, MIXED) == ("float16", [None] * 3)


def test_a_mapping_leaves_tables_that_it_does_not_name() -> None:
    assert dtypes_of({"a": "bfloat16"}, MIXED) == ("bfloat16", [None] * 3)
    assert dtypes_of({"c": "float32"}, MIXED) == ("float32", [None, "bfloat16", None])
    assert dtypes_of({"b": "float16", "*": "float32"}, MIXED) == ("float32", [None, "float16", None])


@pytest.mark.parametrize(
    ("given", "compute", "line"),
    [
        ("half", "float32", "row_dtype must be one of float32, float64, float16, bfloat16, got 'half'"),
        (
            {"b": "int8"},
            "float32",
            "row_dtype of table 'b' must be one of float32, float64, float16, bfloat16, got 'int8'",
        ),
        ({"d": "float16"}, "float32", "row_dtype names table 'd', the model has ['a', 'b', 'c']"),
        ({"c": "float16"}, "float64", "table 'c': rows of float16 need a dense part of float32, got float64"),
    ],
)
def test_bad_dtypes_are_refused_in_one_line(given: Any, compute: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        dtypes_of(given, FULL, compute)
    assert str(caught.value) == line
