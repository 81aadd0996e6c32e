from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.backward_shares import BackwardShares, backward_shares, shares_of_text, unit_places
from bagpipe.types.splitmix64 import GOLDEN, mix

#: Of the test over seeds, the number that the contract names.
NUM_SEEDS = 4096


def rule_of(shares: str, stages: int = 4, **settings: int | None) -> BackwardShares:
    given = {"microbatches": 4, **settings}
    return backward_shares(shares_of_text(shares), range(stages), **given)  # type: ignore[arg-type]


def test_a_share_computes_the_last_stages() -> None:
    rule = rule_of("0,0.25,0.3,0.5,1", microbatches=None)
    assert rule.depths == (0, 1, 2, 2, 4)
    place = rule.places[0]
    computed = [[s for s in range(4) if rule.computes(s, batch - place, 0)] for batch in range(5, 10)]
    assert computed == [[], [3], [2, 3], [2, 3], [0, 1, 2, 3]]
    assert rule_of("0.1,0.7,1", stages=10).depths == (1, 7, 10), "a tenth of ten stages is one, in floating point too"


def test_the_order_of_the_stages_is_topological() -> None:
    rule = backward_shares((0.5, 1), (2, 0, 1), microbatches=None)
    computed = [{stage for stage in range(3) if rule.computes(stage, batch, 0)} for batch in range(2)]
    assert sorted(computed, key=len) == [{0, 1}, {0, 1, 2}]


def test_units_are_micro_batches_of_pipes_of_replicas() -> None:
    rule = rule_of("0.5,1", replicas=3, pipes=2)
    assert [rule.unit(*where) for where in [(0, 0, 3), (0, 1, 0), (2, 1, 3)]] == [3, 4, 23]
    assert rule_of("0.5,1", replicas=3, pipes=2, microbatches=None).unit(2, 1, 3) == 2


@given(
    seed=st.integers(0, 2**63 - 1),
    depths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    units=st.integers(1, 12),
    first=st.integers(0, 1000),
)
def test_a_rotation_gives_every_unit_each_share_once(seed: int, depths: list[int], units: int, first: int) -> None:
    rule = BackwardShares(depths=tuple(depths), places=unit_places(seed, units, len(depths)), order=(0, 1, 2, 3))
    for unit in range(units):
        assert sorted(rule.depth(first + b, unit) for b in range(rule.num_shares)) == sorted(depths)
    counts = Counter(rule.places)
    assert max(counts.values()) - min(counts.get(place, 0) for place in range(len(depths))) <= 1, "evenly spread"


@pytest.mark.parametrize(("shares", "units"), [((0.25, 0.5, 0.75, 1), 8), ((0.5, 1), 5), ((0.3, 0.6, 1), 4)])
def test_every_layer_is_unbiased_over_seeds(shares: tuple[float, ...], units: int) -> None:
    """The mean over the units that computed it is the mean of all units, within three standard errors."""
    gradients = np.random.default_rng(3).normal(size=units)
    for stage in range(4):
        estimates = []
        for seed in range(NUM_SEEDS):
            rule = backward_shares(shares, range(4), microbatches=units, seed=seed)
            computed = [unit for unit in range(units) if rule.computes(stage, 7, unit)]
            if computed:
                estimates.append(gradients[computed].mean())
        error = np.std(estimates) / np.sqrt(len(estimates))
        assert abs(np.mean(estimates) - gradients.mean()) <= 3 * error + 1e-12, f"stage {stage}"


def test_places_are_those_of_splitmix64() -> None:
    seed, units, shares = 2**63 - 1, 5, 3
    state = mix(np.array([seed + 1], dtype=np.uint64) * GOLDEN)
    words = mix(state + np.arange(1, units + 2, dtype=np.uint64) * GOLDEN)
    ranks = np.argsort(np.argsort(words[1:]))
    assert unit_places(seed, units, shares) == tuple((int(words[0]) + int(rank)) % shares for rank in ranks)


def test_seeds_start_at_different_places() -> None:
    assert Counter(unit_places(seed, 1, 2)[0] for seed in range(1000)).keys() == {0, 1}
    orders = {unit_places(seed, 4, 4) for seed in range(1000)}
    assert len(orders) == 24, "every order of four units"


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ("0", "backward shares 0 never reach stage 0 of 4, which would not be trained: one of them must be above 0.75"),
        ("0.5,0.75", "backward shares 0.5,0.75 never reach stage 0 of 4"),
        ("1.5", "backward shares must be 0 to 1, at least one, got 1.5"),
        ("-1,1", "backward shares must be 0 to 1, at least one, got -1,1"),
        ("nan,1", "backward shares must be 0 to 1, at least one, got nan,1"),
        ("half", "expected backward shares such as 0.5,1, got 'half'"),
    ],
)
def test_bad_shares_are_refused(shares: str, line: str) -> None:
    with pytest.raises(ScheduleError, match=line):
        rule_of(shares)
