"""Checks that the rules of admission and expiry share; the whole messages are tested with those rules."""

from __future__ import annotations

import pytest

from bagpipe.config.row_rules import by_table_problem, imported_rows, unused_problem
from bagpipe.config.sections import CheckpointConfig, Config, DataConfig, StoreConfig


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ((), None),
        (("a=1", "b = 2"), None),
        (("a=x",), "must be TABLE=DIGITS, got 'a=x'"),
        (("=1",), "must be TABLE=DIGITS, got '=1'"),
        (("a=1", "b=1", "a=2"), "names table 'a' more than once"),
    ],
)
def test_values_by_table(items: tuple[str, ...], problem: str | None) -> None:
    assert by_table_problem(items, str.isdigit, "TABLE=DIGITS") == problem


def test_rows_of_other_jobs() -> None:
    assert imported_rows(Config()) is None
    assert imported_rows(Config(store=StoreConfig(existing="rows-only"))) == "store.existing rows-only"
    started = Config(checkpoint=CheckpointConfig(dir="here", start_from="there"))
    assert imported_rows(started) is None  # its first checkpoint has their names


def test_a_key_that_does_nothing() -> None:
    problem = unused_problem("epochs", lambda data: data.shuffle, "data.shuffle")
    assert problem(Config()) is None
    assert problem(Config(data=DataConfig(epochs=2, shuffle=True))) is None
    assert problem(Config(data=DataConfig(epochs=2))) == "2 needs data.shuffle"
