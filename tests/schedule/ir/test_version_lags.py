from __future__ import annotations

from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.version_lags import VersionLags, version_lags
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES


def test_lags_come_from_the_loop() -> None:
    graph = chain(4, 1)
    lags = version_lags(ASYNCHRONOUS_SCHEDULES["spectrain"].loop(graph))
    assert lags[2] == VersionLags(forward=-1, forward_base=1, backward=-1, backward_base=0)
    assert (lags[2].predicts_forward, lags[2].predicts_backward, lags[2].is_same) == (True, True, False)
    assert (lags[3].predicts_forward, lags[3].predicts_backward, lags[3].is_same) == (True, False, True)
    assert version_lags(ASYNCHRONOUS_SCHEDULES["spectrain-v2"].loop(graph))[1].is_same
    step = step_program(graph, [(0, True)], "spectrain")
    assert step.version_lags == lags
    assert not step_program(graph, [(0, True)], "1f1b").version_lags
