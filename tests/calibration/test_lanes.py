from __future__ import annotations

import dataclasses

import pytest

from bagpipe.calibration.job_times import JobTimes, OpTimes
from bagpipe.calibration.lanes import cores_used, lock_share


def times(step_s: float, **ops: float) -> JobTimes:
    return JobTimes(
        step_s=step_s,
        ops={op: OpTimes(items=0.0, processor_s=seconds) for op, seconds in ops.items()},
        planner_s=0.0,
        server_s=0.0,
        ids=1.0,
    )


OPS = {"F": 4e-3, "B": 5e-3, "OPT": 0.5e-3, "X_UPDATE": 0.5e-3, "X_READ": 1e-3, "X_WRITEBACK": 3e-3}


@pytest.mark.parametrize(("step_s", "share"), [(10e-3, 0.0), (12e-3, 0.5), (14e-3, 1.0), (9e-3, 0.0), (20e-3, 1.0)])
def test_how_long_the_compute_lane_waits_for_the_others(step_s: float, share: float):
    """Its own operations take 10 ms, the others 4 ms."""
    assert lock_share(times(step_s, **OPS)) == pytest.approx(share)


def test_cores_of_a_job():
    """Two ranks of 14 ms, a planner of 2 ms and a server of 3 ms in 20 ms."""
    found = dataclasses.replace(times(20e-3, **OPS), planner_s=2e-3, server_s=3e-3)
    assert cores_used(found, ranks=2) == pytest.approx((2 * 14 + 2 + 3) / 20)
