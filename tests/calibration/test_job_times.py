from __future__ import annotations

from bagpipe.calibration.job_times import JobTimes, OpTimes


def test_times_of_a_record():
    record = {"step_s": 1.0, "ops": {"F": {"items": 2.0, "processor_s": 3.0}}}
    found = JobTimes.of({**record, "planner_s": 5.0, "server_s": 6.0, "ids": 7.0})
    assert found.ops["F"] == OpTimes(items=2.0, processor_s=3.0)
    assert (found.step_s, found.ids) == (1.0, 7.0)
