"""Schedules: a golden table, and torch's schedulers at every step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from bagpipe.errors import InputError
from bagpipe.optim import SGD, settings_of
from bagpipe.rates import (
    Constant,
    Cosine,
    Exponential,
    Plateau,
    PlateauState,
    Polynomial,
    Schedule,
    Shape,
    StepDecay,
)

LR = 0.3

#: Factor of steps 0 to 11, in thousandths.
GOLDEN: dict[str, tuple[Schedule, str]] = {
    "constant": (
        Schedule(),
        "1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000 1000",
    ),
    "warm-up 4": (
        Schedule(warmup_steps=4),
        "   0  250  500  750 1000 1000 1000 1000 1000 1000 1000 1000",
    ),
    "warm-up 4 from 0.2, step every 3": (
        Schedule(shape=StepDecay(factor=0.5, every=3), warmup_steps=4, warmup_start=0.2),
        " 200  400  600  800 1000 1000 1000  500  500  500  250  250",
    ),
    "step at 2, 5, 5": (
        Schedule(shape=StepDecay(factor=0.1, milestones=(2, 5, 5), floor=0.002)),
        "1000 1000  100  100  100    2    2    2    2    2    2    2",
    ),
    "exponential, halved every 2": (
        Schedule(shape=Exponential(factor=0.5, every=2)),
        "1000  707  500  354  250  177  125   88   62   44   31   22",
    ),
    "cosine of 8 to 0.1": (
        Schedule(shape=Cosine(length=8, floor=0.1)),
        "1000  966  868  722  550  378  232  134  100  100  100  100",
    ),
    "warm-up 2, line of 8": (
        Schedule(shape=Polynomial(length=8), warmup_steps=2),
        "   0  500 1000  875  750  625  500  375  250  125    0    0",
    ),
    "square of 10 to 0.5": (
        Schedule(shape=Polynomial(length=10, power=2, floor=0.5)),
        "1000  905  820  745  680  625  580  545  520  505  500  500",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_table(name: str) -> None:
    schedule, expected = GOLDEN[name]
    assert [round(1000 * schedule.factor(step)) for step in range(12)] == [int(word) for word in expected.split()]


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def same(found: Sequence[float], expected: Sequence[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


#: Our shape, and torch's scheduler of an optimizer; none runs for more than 60 steps.
SHAPES: dict[str, tuple[Shape, Callable[[torch.optim.Optimizer], Any]]] = {
    "constant": (Constant(), lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0)),
    "StepLR": (StepDecay(factor=0.7, every=7), lambda o: lr_scheduler.StepLR(o, 7, gamma=0.7)),
    "MultiStepLR": (
        StepDecay(factor=0.3, milestones=(3, 11, 11, 30)),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 11, 11, 30], gamma=0.3),
    ),
    "ExponentialLR": (Exponential(factor=0.93), lambda o: lr_scheduler.ExponentialLR(o, 0.93)),
    "CosineAnnealingLR": (
        Cosine(length=70, floor=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 70, eta_min=0.1 * LR),
    ),
    "PolynomialLR": (Polynomial(length=40, power=1.7), lambda o: lr_scheduler.PolynomialLR(o, 40, power=1.7)),
    "LambdaLR": (
        Polynomial(length=40, power=2, floor=0.2),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.2 + 0.8 * max(0.0, 1 - step / 40) ** 2),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_equal_torch(name: str) -> None:
    shape, make = SHAPES[name]
    same([LR * Schedule(shape=shape).factor(step) for step in range(60)], torch_rates(make, 60))


@pytest.mark.parametrize("warmup", [1, 2, 13])
@pytest.mark.parametrize("name", SHAPES)
def test_a_warm_up_in_front_equals_torch(name: str, warmup: int) -> None:
    shape, make = SHAPES[name]

    def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
        ramp = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=warmup)
        return lr_scheduler.SequentialLR(optimizer, [ramp, make(optimizer)], [warmup])

    schedule = Schedule(shape=shape, warmup_steps=warmup, warmup_start=0.25)
    same([LR * schedule.factor(step) for step in range(60)], torch_rates(sequence, 60))


@given(
    st.sampled_from([shape for shape, _ in SHAPES.values()]),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_factors_lie_between_0_and_1(
    shape: Shape, warmup: int, start: float, step: int, epoch: int, by_epoch: bool
) -> None:
    schedule = Schedule(shape=shape, warmup_steps=warmup, warmup_start=start, by_epoch=by_epoch)
    assert 0 <= schedule.factor(step, epoch) <= 1


def test_a_schedule_by_epochs_is_warmed_up_by_steps() -> None:
    schedule = Schedule(shape=StepDecay(factor=0.5, every=1), warmup_steps=4, by_epoch=True)
    batches = [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]
    assert [schedule.factor(step, epoch) for step, epoch in batches] == [0, 0.25, 0.5, 0.375, 0.5, 0.5, 0.25]


def test_a_schedule_is_a_rate_of_row_optimizers() -> None:
    schedule = Schedule(shape=Cosine(length=8), warmup_steps=2)
    rate = schedule.times(0.5)
    assert SGD(lr=rate).rate(6) == 0.5 * schedule.factor(6)
    assert settings_of([SGD(lr=rate), SGD(lr=schedule.times(0.5)), SGD(lr=schedule.times(1.0))]) == (0, 0, 1)
    with pytest.raises(InputError, match="a function of the step needs a schedule by steps"):
        dataclasses.replace(schedule, by_epoch=True).times(0.5)


# ---- plateau ---------------------------------------------------------------------------------------------------------

METRICS = [
    1.0,
    0.9,
    0.9,
    0.8999,
    0.91,
    0.7,
    0.7,
    0.71,
    0.7,
    0.7,
    0.7,
    0.7,
    0.69,
    math.nan,
    0.7,
    0.7,
    0.7,
    0.7,
    0.7,
    0.1,
]


@pytest.mark.parametrize("larger_is_better", [False, True])
@pytest.mark.parametrize("mode", ["rel", "abs"])
@pytest.mark.parametrize(("patience", "cooldown"), [(0, 0), (1, 0), (2, 3), (0, 2)])
def test_a_plateau_equals_torch(larger_is_better: bool, mode: Any, patience: int, cooldown: int) -> None:
    plateau = Plateau(
        drop=0.5, patience=patience, threshold=0.01, threshold_mode=mode, cooldown=cooldown, floor=0.05,
        larger_is_better=larger_is_better,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=LR)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, "max" if larger_is_better else "min", factor=0.5, patience=patience, threshold=0.01,
        threshold_mode=mode, cooldown=cooldown, min_lr=0.05 * LR, eps=0,
    )  # fmt: skip
    state = PlateauState()
    for metric in [math.nan, *METRICS]:
        state = plateau.update(state, metric)
        scheduler.step(metric)
        assert LR * plateau.factor(state) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        # A checkpoint keeps it as JSON.
        state = PlateauState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert state.factor < 1


def test_a_metric_that_is_not_a_number_is_no_improvement() -> None:
    state = Plateau(patience=5).update(PlateauState(), math.nan)
    assert state == PlateauState(num_bad=1)
