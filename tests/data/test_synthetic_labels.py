from __future__ import annotations

import numpy as np
import pytest

from data.synthetic_labels import DENSE_SIGNAL, ID_SIGNAL, calibrate, dense_part, id_part


@pytest.mark.parametrize("rate", [0.01, 0.25, 0.9])
def test_calibrated_rate_and_spread(rate: float) -> None:
    rng = np.random.Generator(np.random.Philox(0))
    dense, ids = rng.random(20_000) * 30 + 5, rng.random(20_000) ** 8
    model = calibrate(dense, ids, rate)
    assert model.chance(dense, ids).mean() == pytest.approx(rate, rel=1e-6)
    assert (model.dense_scale * dense).std() == pytest.approx(DENSE_SIGNAL)
    assert (model.id_scale * ids).std() == pytest.approx(ID_SIGNAL)


def test_constant_parts_are_left_alone() -> None:
    model = calibrate(np.zeros(10), np.zeros(10), 0.5)
    assert model.chance(np.zeros(10), np.zeros(10)) == pytest.approx(0.5)


def test_effects_belong_to_ids_and_tables() -> None:
    lengths = np.array([1, 0, 2, 1], np.int32)
    part = id_part("t", np.array([5, 5, 6, 5]), lengths)
    assert part[0] == part[3] != 0
    assert part[1] == 0
    alone = id_part("t", np.array([6]), np.array([1], np.int32))
    assert part[2] == pytest.approx((part[0] + alone[0]) / np.sqrt(2))
    assert id_part("u", np.array([5]), np.array([1], np.int32))[0] != part[0]
    many = id_part("t", np.arange(10_000), np.ones(10_000, np.int32))
    assert abs(many.mean()) < 0.01
    assert np.abs(many).max() <= 0.5


def test_missing_values_add_nothing() -> None:
    counts = np.array([[3, 7, 1], [0, 7, 0]])
    present = np.array([[True, True, True], [False, True, False]])
    expected = [-np.log1p(3) + np.log1p(7) + np.log1p(1), np.log1p(7)]
    assert dense_part(counts, present) == pytest.approx(expected)
