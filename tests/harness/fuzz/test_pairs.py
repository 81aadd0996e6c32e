"""Jobs of the pairwise array have the pairs of their rows, are valid, and lack what docs/dense.md's table refuses."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from tests.harness.fuzz.axes import AXES, RANKS, WEIGHTED, keys_of, problem
from tests.harness.fuzz.covering import all_pairs, pairs_of
from tests.harness.fuzz.draw import NOWHERE, settings_of
from tests.harness.fuzz.pairs import PairArray, draw_of, pair_array
from tests.harness.fuzz.space import TWIN, config_of
from tools import make_pairs_table as documented

SEED = 3
#: What a CPU lacks.
LEFT = {"CUDA graph"}
WAYS = {name: keys for name, keys in {**documented.AXES, **documented.PARTS}.items() if name not in LEFT}
AXIS_OF = {name: axis for axis, values in AXES.items() for name in values}


@cache
def array() -> PairArray:
    return pair_array(SEED)


def test_a_value_has_one_axis() -> None:
    assert len(AXIS_OF) == sum(map(len, AXES.values()))


def test_the_array_is_small_and_has_every_pair_that_is_not_refused() -> None:
    found = {pair for row in array().covering.rows for pair in pairs_of(row, AXES)}
    assert found == set(all_pairs(WEIGHTED)) - set(array().covering.refused)
    assert 60 <= len(array()) <= 120
    assert not any(problem(row) for row in array().covering.rows)


def test_few_jobs_are_compiled() -> None:
    assert sum(row["compiler"] == "compiled" for row in array().covering.rows) < len(array()) / 4


def test_the_array_lacks_what_the_documented_table_refuses() -> None:
    """The values of the array that the table names, each beside each other."""
    assert set(AXIS_OF) >= set(WAYS)
    refused = {frozenset((one[1], two[1])): why for (one, two), why in array().covering.refused.items()}
    for one, two in combinations(WAYS, 2):
        if AXIS_OF[one] == AXIS_OF[two]:
            continue
        expected, _, _ = documented.problem(WAYS[one], WAYS[two]).partition(", got ")
        found, _, _ = refused.get(frozenset((one, two)), "").partition(", got ")
        assert found == expected, f"{one} + {two}"


@pytest.mark.parametrize("place", [0, 1])
def test_jobs_are_valid_and_have_the_values_of_their_rows(place: int) -> None:
    for number, row in enumerate(array().covering.rows[:20]):
        drawn = draw_of(row, SEED, number, place)
        keys = keys_of(row)
        assert drawn.world_size == int(row[RANKS])
        assert dict(drawn.job).items() >= {path: text for path, text in keys.items() if path not in TWIN}.items()
        for twin in drawn.twins:
            config_of(settings_of(drawn, twin, NOWHERE))
        for twin in drawn.twins[1:]:
            assert dict(twin.settings).items() >= {path: keys[path] for path in keys if path in TWIN}.items()
        assert [bool(twin.kills) for twin in drawn.twins] == [False, False, True]


def test_a_job_is_a_function_of_its_row_and_numbers() -> None:
    row = array().covering.rows[5]
    assert draw_of(row, SEED, 5) == draw_of(row, SEED, 5)
    assert len({str(draw_of(row, SEED, 5, place).log) for place in range(3)}) == 3
