"""Jobs with K-FAC beside whatever else stages have: the same bits with any cache, on ranks, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.recording import Crash, recorded
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig

KFAC: dict[str, object] = {
    "optim__precondition": "kfac",
    "optim__kfac_inverse_every": 2,
    "optim__kfac_damping": 0.1,
    "pipeline__microbatches": 4,
}
LAG: dict[str, object] = {"optim__kfac_lag": 1}
LATE: dict[str, object] = {"pipeline__rows_delay": 1}

#: Schedules, and changes.
CASES: list[tuple[str, dict[str, object]]] = [
    ("pipedream", {}),
    ("pipedream-2bw", LATE),
    ("pipeoptim", {**LATE, **LAG}),
    ("spectrain", LAG),
]


@pytest.mark.parametrize(("schedule", "keys"), some_of(CASES, {0, 1, 2}))
def test_weights_have_versions(clicks: MakeConfig, schedule: str, keys: dict[str, object]) -> None:
    config = staged(change(clicks(limit=150), run__dtype="float64"), schedule, 2, **{**KFAC, **keys})
    cached = run_job(change(config, cache__rows=200)).digests
    assert cached == run_job(change(config, cache__rows=0)).digests
    assert cached == run_staged(config, 2).digests
    assert cached != run_job(change(config, optim__precondition="none", optim__kfac_lag=0)).digests


@pytest.mark.parametrize("keys", [{}, LAG])
def test_lanes_choose_their_order(clicks: MakeConfig, keys: dict[str, object]) -> None:
    """Nobody knows the gaps of such an order: the work comes last."""
    config = staged(change(clicks(limit=150), run__dtype="float64"), "dynamic", 2, **{**KFAC, **keys})
    cached = run_job(change(config, cache__rows=200)).digests
    assert cached == run_job(change(config, cache__rows=0)).digests
    assert cached == run_staged(config, 2).digests
    assert_equal_numbers(run_staged(config), run_staged(change(config, pipeline__schedule="1f1b")))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "keys"),
    some_of(
        [
            ("pipedream", {}),
            ("pipedream-2bw", LAG),
            ("1f1b", {"pipeline__backward_shares": "0.25,1"}),
            ("1f1b", {"pipeline__backward_shares": "0.25,1", **LAG}),
        ],
        {1, 3},
    ),
)
def test_a_killed_job_goes_on(
    clicks: MakeConfig, schedule: str, keys: dict[str, object], ranks: int, tmp_path: Path
) -> None:
    config = change(staged(clicks(limit=300), schedule, 2, **{**KFAC, **keys}), cache__rows=200)
    job = recorded(config, tmp_path, every=3, world_size=ranks)
    with pytest.raises(Crash):
        job.run(crash_at=8)
    direct = recorded(change(config, cache__rows=0), tmp_path, every=0, world_size=ranks).run()
    assert job.run().digests == direct.digests
