"""Rates that follow schedules. Whole jobs with them: `tests/system/test_optim_settings.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep, RowSteps
from bagpipe.rates import Schedule, StepDecay
from bagpipe.training.learning_rates import LearningRates
from bagpipe.training.part import LoopRun
from tests.training.small import small_dense

HALVED = Schedule(shape=StepDecay(factor=0.5, every=1))


def batch_of(row_steps: RowSteps, reader_state: Any = None) -> Any:
    """A batch under way, as the part sees it."""
    return SimpleNamespace(
        row_steps=row_steps, rank_batch=SimpleNamespace(batch=SimpleNamespace(reader_state=reader_state))
    )


def run_hooks(part: LearningRates, batches: dict[int, Any]) -> None:
    part.start(LoopRun(batches=iter(()), parts=(part,), in_flight=batches))
    for hook in part.hooks():
        for b in batches:
            hook.call((0, ""), b)


def test_each_batch_has_the_factors_of_its_number() -> None:
    dense = small_dense()
    one, many = RowStep(lr=0.8, eps=0.0, step=4), (RowStep(lr=0.8, eps=0.1, step=5), RowStep(lr=0.4, eps=0.2, step=5))
    batches = {3: batch_of(one), 2: batch_of(many)}
    run_hooks(LearningRates(dense, schedule=HALVED, rows=HALVED), batches)
    assert batches[3].row_steps == RowStep(lr=0.1, eps=0.0, step=4)
    assert batches[2].row_steps == (RowStep(lr=0.2, eps=0.1, step=5), RowStep(lr=0.1, eps=0.2, step=5))
    assert dense.optimizer.param_groups[0]["lr"] == 0.1 / 4


def test_a_second_run_begins_with_the_configured_rate() -> None:
    dense = small_dense()
    part = LearningRates(dense, schedule=HALVED, rows=Schedule())
    for b in (5, 0):
        run_hooks(part, {b: batch_of(())})
    assert dense.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("state", [None, {"position": 3}])
def test_a_schedule_by_epochs_needs_the_epoch(state: Any) -> None:
    by_epoch = Schedule(shape=StepDecay(factor=0.5, every=1), by_epoch=True)
    part = LearningRates(small_dense(), schedule=Schedule(), rows=by_epoch)
    step = RowStep(lr=0.8, eps=0.0, step=8)
    batches = {7: batch_of(step, {"epoch": 2})}
    run_hooks(part, batches)
    assert batches[7].row_steps == RowStep(lr=0.2, eps=0.0, step=8)
    with pytest.raises(InputError, match="expected the epoch of every batch in the state of the reader"):
        run_hooks(part, {7: batch_of(step, state)})
