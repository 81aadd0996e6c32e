from __future__ import annotations

import dataclasses
import json

import pytest

from bagpipe.errors import InputError
from data.next_use_mark import MARK_KEY, NextUseMark

MARK = NextUseMark(
    run="a",
    file=0,
    num_files=1,
    rows=9,
    num_rows=9,
    train_rows=8,
    seed=None,
    epochs=1,
    layout="parquet/65536",
    schema="b",
)


@pytest.mark.parametrize("mark", [MARK, dataclasses.replace(MARK, seed=7, epochs=2)])
def test_a_mark_goes_through_metadata(mark: NextUseMark) -> None:
    assert NextUseMark.of("x", mark.metadata()) == mark


def test_a_file_without_metadata_has_no_mark() -> None:
    assert NextUseMark.of("x", None) is None
    assert NextUseMark.of("x", {b"other": b"1"}) is None


def test_each_shuffled_epoch_has_its_columns() -> None:
    assert MARK.column("C1", 0) == "C1.next_use"
    assert dataclasses.replace(MARK, seed=7, epochs=2).column("C1", 1) == "C1.next_use.1"


@pytest.mark.parametrize("change", [{"rows": "9"}, {"version": 2}, {"seed": "x"}, {"more": 1}, {"run": None}])
def test_a_damaged_mark_is_refused(change: dict[str, object]) -> None:
    value = json.loads(MARK.metadata()[MARK_KEY]) | change
    with pytest.raises(InputError, match=r"^x: (expected next uses of version 1, got 2|the description of next uses)"):
        NextUseMark.of("x", {MARK_KEY: json.dumps(value).encode()})
