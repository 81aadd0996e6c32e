from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from trainer.ranking import areas_by_group


def test_the_area_is_the_share_of_ordered_pairs() -> None:
    scores, positive = np.array([3.0, 1.0, 2.0, 2.0]), np.array([True, False, True, False])
    areas = areas_by_group(scores, positive)
    assert (areas.examples.tolist(), areas.positives.tolist(), areas.wins.tolist()) == ([4], [2], [7])
    assert areas.areas().tolist() == [3.5 / 4]


def test_groups_come_in_ascending_order_and_those_of_one_class_have_no_area() -> None:
    groups = np.array([7, -2, 7, 5, -2, 5])
    positive = np.array([True, True, False, True, False, True])
    areas = areas_by_group(np.array([1.0, 0.0, 2.0, 0.5, 0.0, 0.6]), positive, groups)
    assert areas.groups.tolist() == [-2, 5, 7]
    assert areas.has_both.tolist() == [True, False, True]
    assert areas.areas().tolist() == [0.5, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_areas_are_those_of_scikit_learn_group_by_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    scores = rng.integers(0, int(rng.integers(1, 60)), size) / 7
    groups, positive = rng.integers(-3, 8, size), rng.random(size) < rng.random()
    areas = areas_by_group(scores, positive, groups)
    assert areas.groups.tolist() == sorted(set(groups.tolist()))
    expected = [
        roc_auc_score(positive[chosen], scores[chosen])
        for chosen in (groups == number for number in areas.groups)
        if 0 < positive[chosen].sum() < chosen.sum()
    ]
    assert areas.areas() == pytest.approx(expected, abs=1e-12)


def test_pairs_of_a_hundred_thousand_examples_are_counted_exactly() -> None:
    size = 100_000
    areas = areas_by_group(np.arange(size, dtype=np.float64), np.arange(size) % 2 == 1)
    pairs = (size // 2) ** 2
    assert int(areas.wins[0]) == pairs + size // 2
