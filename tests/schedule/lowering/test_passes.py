from __future__ import annotations

from collections.abc import Sequence

import pytest

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.optimizer import reduce_lane
from bagpipe.schedule.lowering.passes import PASSES
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import dense


def lower(program: Program, passes: Sequence[str]) -> Program:
    """Apply the passes with one process per lane, as the command line does."""
    home = {lane: process for process, lane in enumerate(program.lanes)}
    home |= {reduce_lane(process): process for process in range(len(home))}
    for name in passes:
        program = PASSES[name](program, home)
    return program


@pytest.mark.parametrize("name", DENSE_SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_can_be_lowered(name: str, recompute: bool) -> None:
    passes = ["flatten-pipes", *(["recompute"] if recompute else []), "reduce-grad", "optimizer", "sends"]
    check(lower(dense(name, 4, 8), [*passes, "defer-receives"]))


@pytest.mark.parametrize("name", DENSE_SCHEDULES)
def test_the_passes_make_the_program_that_is_trained(name: str) -> None:
    program, stages = dense(name, 4, 16), 4 * DENSE_SCHEDULES[name].chunks
    last = ["separate-receives"] if name == "dynamic" else []
    passes = ["recompute", "flatten-pipes", "embedding", "reduce-grad", "optimizer", "unshard", "sends", *last]
    lowered = lower(program, passes)
    step = step_program(
        chain(stages, 16),
        [(0, True), (stages - 1, False)],
        name,
        num_processes=4,
        replicas=2,
        recompute=True,
        shards=True,
    )
    trained = {lane.replace("compute", "rank"): actions for lane, actions in step.program.lanes.items()}
    assert lowered.lanes == trained
    assert set(lowered.edges) == set(step.program.edges)
    assert lowered.stages == step.program.stages
