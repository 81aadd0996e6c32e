from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.zipf import MAX_VOCABULARY, ZipfLaw

LAWS = st.builds(
    ZipfLaw,
    vocabulary=st.one_of(st.integers(1, 50), st.integers(1, MAX_VOCABULARY)),
    exponent=st.floats(0, 4),
    shift=st.floats(0, 1000),
    head=st.floats(0, 0.99),
)
EDGES = [0.0, 2**-53, 0.25, 0.5, 0.75, 1 - 2**-53]


@given(LAWS, st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_ranks_lie_in_the_vocabulary_and_rise(law: ZipfLaw, uniforms: list[float]) -> None:
    ranks = law.ranks(np.sort(np.array(EDGES + uniforms)))
    assert ranks.dtype == np.int64
    assert ranks.min() >= 0
    assert ranks.max() < law.vocabulary
    assert (np.diff(ranks) >= 0).all()


def test_the_largest_draw_gives_the_last_rank_of_a_steep_law() -> None:
    law = ZipfLaw(vocabulary=262144, exponent=4.0, head=0.28686557004754704)
    assert law.ranks(np.array([np.nextafter(1.0, 0.0)])).tolist() == [262143]


def test_shares_are_those_of_the_law() -> None:
    law = ZipfLaw(vocabulary=1000, exponent=1.3, shift=2.0, head=0.2)
    uniforms = (np.arange(1_000_000) + 0.5) / 1_000_000
    shares = np.bincount(law.ranks(uniforms), minlength=1000) / 1_000_000
    # the integral of the density over each rank, and the head
    bounds = (np.arange(1, 1001) + law.shift) ** -0.3
    expected = np.concatenate([[0.2], 0.8 * np.diff(bounds) / (bounds[-1] - bounds[0])])
    np.testing.assert_allclose(shares, expected, atol=3e-6)


def test_exponent_one_is_the_limit_of_its_neighbours() -> None:
    uniforms = np.linspace(0, 1, 1001)[:-1]
    near, at = (ZipfLaw(vocabulary=10**6, exponent=exponent).ranks(uniforms) for exponent in (1 + 1e-7, 1.0))
    np.testing.assert_allclose(near, at, rtol=1e-5, atol=1)


def test_every_rank_of_a_huge_vocabulary_can_come() -> None:
    law = ZipfLaw(vocabulary=MAX_VOCABULARY, exponent=0.0)
    ranks = law.ranks(np.array([0.0, 0.5, 1 - 2**-50]))
    assert ranks[1] == pytest.approx(MAX_VOCABULARY / 2, rel=1e-9)
    assert ranks[2] > MAX_VOCABULARY - 1025


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be between 1 and"),
        ({"vocabulary": 2**41}, "vocabulary must be between 1 and"),
        ({"vocabulary": 5, "exponent": -1.0}, "exponent must be between 0 and 10, got -1.0"),
        ({"vocabulary": 5, "shift": -1.0}, "shift must be at least 0, got -1.0"),
        ({"vocabulary": 5, "head": 1.0}, "head must be at least 0 and below 1, got 1.0"),
    ],
)
def test_impossible_laws_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ZipfLaw(**options)  # type: ignore[arg-type]
