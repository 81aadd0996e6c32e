from __future__ import annotations

import pytest

from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop
from bagpipe.schedule.builders.prefetch_loop import declare_exchange, declare_reading, declare_rows, declare_update
from bagpipe.schedule.builders.whole_model import declare_accumulation, declare_dense
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.loop_builder import LoopBuilder


def loop_of(*, together: bool, microbatches: int, ranks: int, preconditions: bool, clips: bool = False) -> Loop:
    builder = LoopBuilder(read_ahead=4)
    declare_reading(builder)
    declare_rows(builder, prefetch_depth=2, write_depth=2)
    if ranks > 1:
        declare_exchange(builder, write_depth=2, clips=clips)
    else:
        declare_update(builder, clips=clips)
    if together:
        declare_accumulation(builder, microbatches=microbatches)
    else:
        declare_dense(builder, microbatches=microbatches, preconditions=preconditions, broadcasts=ranks > 1)
    return builder.build().loop


@pytest.mark.parametrize("preconditions", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_every_form_is_a_loop_that_the_runner_takes(
    together: bool, ranks: int, preconditions: bool, clips: bool
) -> None:
    loop = loop_of(together=together, microbatches=3, ranks=ranks, preconditions=preconditions, clips=clips)
    check_loop(loop, RUNNER_RULES)
    check(loop.unroll(3))


def test_covariances_follow_the_backward_of_their_micro_batch() -> None:
    lane = loop_of(together=False, microbatches=2, ranks=2, preconditions=True).unroll(1).lanes["compute"]
    assert " ".join(action.text for action in lane) == (
        "0F0 0B0 0COV_A0 0COV_G0 0F1 0B1 0COV_A1 0COV_G1 0REDUCE_GRAD0 0X_INV0 0PRECOND0 0X_BCAST0 0OPT0 0X_UPDATE0"
    )
    lane = loop_of(together=False, microbatches=1, ranks=1, preconditions=True).unroll(1).lanes["compute"]
    assert " ".join(action.text for action in lane) == (
        "0F0 0B0 0X_UPDATE0 0COV_A0 0COV_G0 0REDUCE_GRAD0 0X_INV0 0PRECOND0 0OPT0"
    )


def test_without_it_there_are_forwards_backwards_and_a_step() -> None:
    lane = loop_of(together=False, microbatches=2, ranks=2, preconditions=False).unroll(1).lanes["compute"]
    assert " ".join(action.text for action in lane) == "0F0 0B0 0F1 0B1 0OPT0 0X_UPDATE0"
