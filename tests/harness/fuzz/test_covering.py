"""Covering arrays have every allowed pair, and no row that the rules refuse."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.fuzz.covering import Axes, Pair, Row, all_pairs, cover, pairs_of

Rules = list[Row]


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Axes, Rules]:
    """Small axes, and values of two or three axes that do not go together."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    weights = st.sampled_from([0.2, 1.0, 3.0])
    axes = {f"axis{n}": {str(value): draw(weights) for value in range(size)} for n, size in enumerate(sizes)}
    one = st.lists(st.sampled_from(list(axes)), min_size=2, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(list(axes[name])) for name in names})
    )
    return axes, draw(st.lists(one, max_size=8))


def problem_of(rules: Rules, row: Row) -> str:
    return next((f"not {rule}" for rule in rules if rule.items() <= row.items()), "")


def by_hand(axes: Axes, rules: Rules) -> set[Pair]:
    """The pairs of all rows that the rules allow."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return {pair for row in rows if not problem_of(rules, row) for pair in pairs_of(row, axes)}


@given(spaces(), st.integers(0, 3))
def test_every_allowed_pair_is_covered(space: tuple[Axes, Rules], seed: int) -> None:
    axes, rules = space
    found = cover(axes, lambda row: problem_of(rules, row), seed=seed, num_candidates=2)
    covered = {pair for row in found.rows for pair in pairs_of(row, axes)}
    assert covered == by_hand(axes, rules)
    assert set(found.refused) == set(all_pairs(axes)) - covered
    assert all(found.refused.values())
    for row in found.rows:
        assert list(row) == list(axes)
        assert problem_of(rules, row) == ""


@given(spaces())
def test_a_covering_is_a_function_of_its_arguments(space: tuple[Axes, Rules]) -> None:
    axes, rules = space
    assert cover(axes, lambda row: problem_of(rules, row)) == cover(axes, lambda row: problem_of(rules, row))


@given(spaces())
def test_every_row_is_needed(space: tuple[Axes, Rules]) -> None:
    axes, rules = space
    rows = cover(axes, lambda row: problem_of(rules, row)).rows
    for row in rows:
        others = {pair for other in rows if other is not row for pair in pairs_of(other, axes)}
        assert not set(pairs_of(row, axes)) <= others


def test_few_rows_cover_many_axes() -> None:
    """Of ten axes with three values each: 59049 rows in all, 405 pairs, at least 9 rows; greedy ones have about 20."""
    axes = {f"axis{n}": dict.fromkeys("abc", 1.0) for n in range(10)}
    assert len(cover(axes, lambda row: "").rows) <= 22


def test_a_value_of_little_weight_is_in_few_rows() -> None:
    axes = {f"axis{n}": dict.fromkeys("abc", 1.0) for n in range(8)} | {"last": {"cheap": 1.0, "dear": 0.1}}
    rows = cover(axes, lambda row: "").rows
    assert sum(row["last"] == "dear" for row in rows) < len(rows) / 2


def test_a_pair_is_refused_with_the_words_of_its_rule() -> None:
    axes = {name: dict.fromkeys("xy", 1.0) for name in "abc"}
    rules: Rules = [{"a": "x", "b": "x"}, {"a": "y", "b": "x", "c": "x"}, {"a": "y", "c": "y"}]
    found = cover(axes, lambda row: problem_of(rules, row))
    assert found.refused[("a", "x"), ("b", "x")] == "not {'a': 'x', 'b': 'x'}"
    assert found.refused[("a", "y"), ("b", "x")].startswith("with every further value: not ")
