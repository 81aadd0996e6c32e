from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, check_loop
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Stage

EDGES = (Edge(src="X_READ", dst="X_FETCH"), Edge(src="X_FETCH", dst="F"))


def one_thread(read: int, get: int) -> Loop:
    """A software pipeline on one lane: reads `read` batches ahead, fetches `get` ahead."""
    templates = (Template(op="X_READ", offset=read), Template(op="X_FETCH", offset=get), Template(op="F"))
    return Loop(lanes={"all": templates}, edges=EDGES, source=(0, "X_READ"), sink=(0, "F"))


def text(loop: Loop, num_batches: int) -> dict[str, str]:
    lanes = loop.unroll(num_batches).lanes
    return {lane: " ".join(action.text for action in actions) for lane, actions in lanes.items()}


def test_offsets_make_a_ramp_up_and_a_ramp_down() -> None:
    loop = one_thread(read=2, get=1)
    assert text(loop, 3) == {"all": "0X_READ0 0X_READ1 0X_FETCH0 0X_READ2 0X_FETCH1 0F0 0X_FETCH2 0F1 0F2"}
    check_loop(loop)
    check(loop.unroll(3))


@pytest.mark.parametrize("num_batches", [0, 1])
def test_fewer_batches_than_the_ramp_is_long(num_batches: int) -> None:
    check(one_thread(read=5, get=2).unroll(num_batches))


def test_negative_number_of_batches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least 0"):
        one_thread(1, 1).unroll(-1)


def test_micro_batches_are_counted_over_all_batches() -> None:
    templates = (Template(op="X_READ"), Template(op="F", unit=1), Template(op="F", unit=0))
    loop = Loop(
        lanes={"all": templates},
        source=(0, "X_READ"),
        sink=(0, "F"),
        stages=(Stage(number=0, micro_per_batch=2),),
    )
    assert text(loop, 2) == {"all": "0X_READ0 0F1 0F0 0X_READ1 0F3 0F2"}


def test_an_edge_to_nowhere_is_refused() -> None:
    loop = Loop(lanes={"all": (Template(op="X_READ"),)}, edges=EDGES[:1], source=(0, "X_READ"), sink=(0, "X_READ"))
    with pytest.raises(ScheduleError, match="no lane performs 0X_FETCH, unit 0"):
        loop.dependencies()
