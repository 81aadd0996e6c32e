"""The settings that trainer and cacher compare."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client.agreement import (
    MAX_CREDITS,
    Difference,
    batches_per_message,
    credits_for,
    first_difference,
    settings_of,
)
from bagpipe.config.sections import CacheConfig, Config, DataConfig

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_a_value_equals_itself_after_serialisation(value: object) -> None:
    assert first_difference(value, json.loads(json.dumps(value))) is None


@given(JSON, JSON)
def test_a_difference_is_found_from_both_sides(first: object, second: object) -> None:
    assert (first_difference(first, second) is None) == (first_difference(second, first) is None)


@pytest.mark.parametrize(
    ("first", "second", "path", "shown"),
    [
        ({"a": 1}, {"a": 2}, "a", ("1", "2")),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1]", ("2", "3")),
        ({"a": 1}, {}, "a", ("1", "nothing")),
        ({}, {"a": None}, "a", ("nothing", "None")),
        ({"a": [1]}, {"a": [1, 2]}, "a", ("[1]", "[1, 2]")),
        ({"a": True}, {"a": 1}, "a", ("True", "1")),
        ({"a": "x" * 300}, {"a": ""}, "a", ("'" + "x" * 199 + "…", "''")),
    ],
)
def test_the_first_difference(first: object, second: object, path: str, shown: tuple[str, str]) -> None:
    assert first_difference(first, second) == Difference(path=path, first=shown[0], second=shown[1])


def test_every_data_key_counts_but_the_parser_processes() -> None:
    keys = {key for key in settings_of(Config()) if key.startswith("data.")}
    assert keys == {f"data.{field.name}" for field in dataclasses.fields(DataConfig)} - {"data.workers"}


@pytest.mark.parametrize(
    ("batch_size", "prefetch_depth", "credits", "together"),
    [(4_096, 4, 6, 1), (512, 4, 8, 2), (64, 4, 38, 9), (1, 1, 35, 8), (1, 1_000, MAX_CREDITS, 256)],
)
def test_small_batches_have_more_credits(batch_size: int, prefetch_depth: int, credits: int, together: int) -> None:
    """As many as a cacher accepts, however far a rank reads ahead."""
    cache = CacheConfig(prefetch_depth=prefetch_depth)
    found = credits_for(Config(data=DataConfig(batch_size=batch_size), cache=cache))
    assert (found, batches_per_message(found)) == (credits, together)
