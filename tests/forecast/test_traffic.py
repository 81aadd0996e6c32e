from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.forecast.traffic import read_traffic, unique_curve
from tests.forecast.jobs import TRAFFIC, replay


def test_counts_are_means_of_a_batch() -> None:
    assert read_traffic(replay(), source="x") == (TRAFFIC,)
    assert TRAFFIC.total_cache_rows == 20_000


def test_settings_that_cannot_be_trained_are_left_out() -> None:
    changes: list[dict[str, Any]] = [{}, {"error": "no"}, {"evictions_waiting": None}]
    records = [json.loads(replay(**each))[0] for each in changes]
    assert len(read_traffic(json.dumps(records), source="x")) == 1
    assert len(read_traffic(json.dumps({"records": records[:1]}), source="x")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "mine: not JSON: "),
        ("5", "mine: expected a list of records, as `data replay --json` writes it"),
        ("[5]", "mine: expected a list of records, as `data replay --json` writes it"),
        (replay(error="too small"), "mine: expected a record that succeeded, with rows of one size, got none"),
        (replay(batches=0), "mine: expected records of `data replay --json`, got one without "),
        (replay(batches="many"), "mine: expected records of `data replay --json`, got one without "),
        (replay().replace("lookahead", "ahead"), "mine: expected records of `data replay --json`, got one without "),
    ],
)
def test_other_files_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_traffic(text, source="mine")
    assert str(caught.value).startswith(message)


def test_unique_rows_of_other_batches() -> None:
    large = replace(TRAFFIC, batch_examples=4096, unique=16_000.0, ids=106_496.0)
    curve = unique_curve([large, TRAFFIC])
    assert curve.unique_at([1024, 4096]) == pytest.approx([8_000, 16_000])
    assert float(curve.unique_at(2048)) == pytest.approx(8_000 * 2**0.5)  # four times the examples, twice the rows
    assert float(curve.unique_at(16_384)) == pytest.approx(32_000)
    assert float(curve.ids_at(512)) == pytest.approx(13_312)
    with pytest.raises(ValueError, match="expected at least one setting"):
        unique_curve([])


@given(st.floats(0.5, 1e6), st.lists(st.integers(1, 10_000), min_size=1, max_size=4, unique=True))
def test_there_are_never_more_unique_rows_than_ids(examples: float, sizes: list[int]) -> None:
    curve = unique_curve([replace(TRAFFIC, batch_examples=size, unique=size**0.7, ids=26.0 * size) for size in sizes])
    found = curve.unique_at(np.array([examples]))
    assert 0 < found[0] <= curve.ids_at(examples) * (1 + 1e-9)


def test_rows_of_a_later_epoch_are_read() -> None:
    found = TRAFFIC.with_stored_rows()
    assert (found.fetched, found.new) == (TRAFFIC.fetched + TRAFFIC.new, 0.0)
    assert found.written == TRAFFIC.written
