from __future__ import annotations

from bagpipe.calibration.planner import measure_planner


def test_ids_of_a_second():
    assert measure_planner() > 0
