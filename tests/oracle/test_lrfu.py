from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.oracle.lrfu import HALF_LIFE_CACHES, NEVER_USED, NO_SCORE, TICKS, GhostScores, LrfuClock

NUM_SLOTS = 8
HALF_LIFE_USES = HALF_LIFE_CACHES * NUM_SLOTS


def scores_of(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@given(st.lists(st.integers(0, 2**4 - 1), min_size=1, max_size=60))
def test_scores_order_rows_by_their_decayed_uses(batches: list[int]) -> None:
    """Each number is a batch; its bits are the rows of four that it uses."""
    clock = LrfuClock(NUM_SLOTS)
    scores, weight = np.full(4, NEVER_USED, dtype=np.int32), np.zeros(4)
    for bits in batches:
        used = np.array([row for row in range(4) if bits >> row & 1], dtype=np.int64)
        weight[used] += 1
        scores[used] = clock.use(scores[used])
        weight /= 2 ** (used.shape[0] / HALF_LIFE_USES)
    # A tick is a 1400th of a weight, and each use rounds by at most half a tick.
    for better, worse in ((a, b) for a in range(4) for b in range(4) if weight[a] > 1.05 * weight[b]):
        assert scores[better] > scores[worse]


def test_a_doubled_weight_adds_a_half_life() -> None:
    clock = LrfuClock(NUM_SLOTS)
    once = clock.use(scores_of(NO_SCORE))
    assert (clock.use(once) - once).tolist() == [pytest.approx(TICKS, abs=TICKS // NUM_SLOTS)]
    clock.use(np.full(HALF_LIFE_USES - 2, NO_SCORE, dtype=np.int32))
    assert (clock.use(scores_of(NO_SCORE)) - once).tolist() == [TICKS]


def test_time_and_weights_saturate() -> None:
    late = LrfuClock(1)
    late._num_uses = 1 << 50
    once = late.use(scores_of(NO_SCORE))
    assert 0 < once[0] == late.use(scores_of(NEVER_USED))[0]
    scores, steady = once, LrfuClock(1 << 40)
    for _ in range(10_000):
        scores = steady.use(scores)
    assert steady.use(scores).tolist() == scores.tolist()


def test_ghost_scores_are_found_by_hash_and_the_higher_stays() -> None:
    ghosts = GhostScores(num_cells=4)
    high = np.uint64(1) << np.uint64(40)
    one, other = np.array([2], dtype=np.uint64), np.array([np.uint64(2) + high])
    assert ghosts.recall(one).tolist() == [NO_SCORE]
    ghosts.remember(one, scores_of(50), [1])
    ghosts.remember(other, scores_of(40), [1])
    assert (ghosts.recall(one).tolist(), ghosts.recall(other).tolist()) == ([50], [NO_SCORE])
    ghosts.remember(other, scores_of(60), [1])
    assert (ghosts.recall(one).tolist(), ghosts.recall(other).tolist()) == ([NO_SCORE], [60])
