from __future__ import annotations

import itertools

import pytest

from tests.system.covering import covering

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2, 3)}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_are_covered(strength: int) -> None:
    rows = covering(AXES, strength=strength)
    for group in itertools.combinations(AXES, strength):
        seen = {tuple(row[name] for name in group) for row in rows}
        assert seen == set(itertools.product(*(AXES[name] for name in group)))
    assert rows == covering(AXES, strength=strength)
    assert len(rows) < 3 * 2 * 2 * 4
