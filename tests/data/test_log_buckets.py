from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.log_buckets import LogBuckets

SQUARED = LogBuckets(rule="log-squared")


def test_the_recipe_of_criteos_benchmarks() -> None:
    """int(log(x) ** 2) if x > 2 else int(x)."""
    numbers = np.array([-3, -1, 0, 1, 2, 3, 4, 10, 100, 1e6, 2.0**62, 1e300])
    assert SQUARED.ids_of(numbers).tolist() == [-3, -1, 0, 1, 2, 1, 1, 5, 21, 190, 1846, 1906]


def test_plain_logarithms() -> None:
    numbers = np.array([-5, 0, 0.5, 1, 1.5, 2, 3.99, 4, 1024, 2.0**63])
    assert LogBuckets(rule="log").ids_of(numbers).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 11, 64]
    assert LogBuckets(rule="log", base=10.0).ids_of(np.array([9.99, 10, 1e6])).tolist() == [1, 2, 7]


@given(st.integers(3, 2**40))
def test_whole_numbers_agree_with_floating_point_logarithms(number: int) -> None:
    assert SQUARED.ids_of(np.array([float(number)])).tolist() == [math.floor(math.log(number) ** 2)]


@pytest.mark.parametrize(
    ("rule", "base", "message"),
    [
        ("squares", 2.0, "buckets must be one of log-squared, log, got 'squares'"),
        ("log", 1.0, "base must be at least 1.01, got 1.0"),
        ("log", float("nan"), "base must be at least 1.01, got nan"),
    ],
)
def test_other_rules_are_refused(rule: str, base: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LogBuckets(rule=rule, base=base)
