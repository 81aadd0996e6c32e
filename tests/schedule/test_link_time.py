from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program, Stage
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program
from tests.schedule.dense import dense
from tests.schedule.link_time import link_time
from tests.schedule.tables import lanes


def test_a_link_takes_latency_and_the_time_of_a_message() -> None:
    """Stage 0 sends 40 bytes in 2 messages, stage 1 the gradient in 4."""
    graph = StageGraph(micro_per_batch=(2, 4), edges=((0, 1),))
    table = lanes(a="0F0 0F1 0B0 0B1", b="1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")
    time = link_time(dense_program(graph, list(table.values())), {(0, 1): 40}, bytes_per_time=10, latency=0.5)
    assert time(parse("0F0"), parse("1F1")) == 0.5 + 2
    assert time(parse("1B3"), parse("0B1")) == 0.5 + 1
    assert time(parse("0F0"), parse("1F2")) == 0.5  # another micro-batch
    assert time(parse("1F0"), parse("0B0")) == 0.5
    assert time(parse("(0F1;2B0)OVERLAP_F_B"), parse("1F2")) == 0.5 + 2
    with pytest.raises(ScheduleError, match="expected a bandwidth above 0, got 0"):
        link_time(dense("gpipe", 2, 2), {}, bytes_per_time=0)


def test_a_source_sends_in_micro_batches_too() -> None:
    program = Program(
        lanes=lanes(a="2X_EMBED0 2X_EMBED_GRAD0", b="1F0 1F1 1B0 1B1"),
        edges=(Edge(src="X_EMBED", src_stage=2, dst="F", dst_stage=1),),
        stages=(Stage(number=1, micro_per_batch=2), Stage(number=2, micro_per_batch=2)),
    )
    time = link_time(program, {(2, 1): 40}, bytes_per_time=10)
    assert time(parse("2X_EMBED0"), parse("1F1")) == time(parse("1B0"), parse("2X_EMBED_GRAD0")) == 2


def test_bandwidth_in_a_simulation() -> None:
    program = dense("gpipe", 2, 1)
    assert simulate(program, latency=link_time(program, {(0, 1): 6}, bytes_per_time=2)).makespan == 1 + 3 + 3 + 3 + 2
