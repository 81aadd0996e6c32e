"""Formulas of K-FAC's operations and bytes, by hand."""

from __future__ import annotations

import pytest

from bagpipe.dense.precondition.costs import KfacDivision, LayerShape, flops, kept_bytes, sent_bytes

LAYERS = (LayerShape(num_inputs=3, num_outputs=2), LayerShape(num_inputs=2, num_outputs=1))


def test_operations() -> None:
    assert flops(LAYERS[0], 10) == {
        "F": 120,  # 2 * 10 * 3 * 2
        "B": 240,
        "COV_A": 180,  # 2 * 10 * 3 * 3
        "COV_G": 80,
        "X_INV": 35,  # 27 + 8
        "PRECOND": 60,  # 2 * 6 * (3 + 2): G^-1 V, then V A^-1
    }


@pytest.mark.parametrize(
    ("division", "expected"), [("local", [104, 40]), ("summed", [104, 40]), ("d-kfac", [144, 144])]
)
def test_memory(division: KfacDivision, expected: list[int]) -> None:
    # Factors have 9 + 4 and 4 + 1 elements; with inverses twice that.
    assert [kept_bytes(LAYERS, division, num_ranks=2, rank=rank) for rank in range(2)] == expected


@pytest.mark.parametrize(
    ("division", "expected"),
    [
        ("local", 4 * 8),  # gradients of 6 + 2
        ("summed", 4 * (8 + 18 / 2)),
        ("d-kfac", 4 * (2 * 18 / 2 + 18 / 4)),
    ],
)
def test_traffic(division: KfacDivision, expected: float) -> None:
    assert sent_bytes(LAYERS, division, num_ranks=2, factor_every=2, inverse_every=4) == expected
    assert sent_bytes(LAYERS, division, num_ranks=1) == 0
