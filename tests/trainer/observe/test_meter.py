from __future__ import annotations

import math

import pytest
import torch

from bagpipe.config.sections import Config, DataConfig, RunConfig
from bagpipe.pipeline.report import LaneReport
from tests.trainer.observe.small import progress
from trainer.observe.meter import LossSoFar, Meter, planned_steps


def test_the_first_interval_begins_with_the_run() -> None:
    meter = Meter(100.0, steps=1, samples=4, num_steps=11)
    values = meter.measure(102.0, progress(), LossSoFar(loss_sum=5.0, samples=10))
    assert values["samples_per_s"] == 3.0
    assert (values["loss"], values["interval_loss"]) == (0.5, None), "the loss before a resume is not known"
    assert (values["hit_rate"], values["interval_hit_rate"]) == (0.75, 0.75)
    assert (values["exposed_share"], values["interval_exposed_share"]) == (0.25, 0.25)
    assert values["eta_s"] == 8.0, "two steps in two seconds, eight are left"


def test_an_interval_is_measured_from_the_one_before() -> None:
    meter = Meter(0.0)
    meter.measure(2.0, progress(), LossSoFar(loss_sum=5.0, samples=10))
    later = progress(steps=5, samples=30, rows_unique=14, rows_inserted=6, elapsed_s=4.0, exposed_s=0.5)
    values = meter.measure(4.0, later, LossSoFar(loss_sum=10.0, samples=20))
    assert (values["samples"], values["samples_per_s"]) == (30, 10.0)
    assert (values["loss"], values["interval_loss"]) == (0.5, 0.5)
    assert (values["interval_hit_rate"], values["interval_exposed_share"]) == (0.5, 0.0)
    assert values["waited_for"] is None
    assert values["eta_s"] is None


def test_the_remaining_time_without_a_number_of_steps_is_by_the_share_of_the_data() -> None:
    values = Meter(0.0).measure(2.0, progress(steps=4, share=0.25), None)
    assert values["eta_s"] == 6.0, "four of sixteen steps in two seconds"
    assert Meter(0.0, num_steps=5).measure(2.0, progress(steps=4, share=0.25), None)["eta_s"] == 0.5
    assert Meter(0.0).measure(2.0, progress(steps=4, share=0.0), None)["eta_s"] is None


def test_a_loss_that_has_not_come_has_no_interval() -> None:
    meter, loss = Meter(0.0), LossSoFar(loss_sum=5.0, samples=10)
    assert meter.measure(1.0, progress(), None)["loss"] is None
    meter.measure(2.0, progress(samples=20), loss)
    values = meter.measure(3.0, progress(samples=30), loss)
    assert (values["loss"], values["interval_loss"]) == (0.5, None)


def test_a_loss_that_is_not_finite_is_none() -> None:
    """JSON has no such number."""
    values = Meter(0.0).measure(1.0, progress(), LossSoFar(loss_sum=math.nan, samples=1))
    assert (values["loss"], values["interval_loss"]) == (None, None)


def test_waits_have_a_reason() -> None:
    waits = LaneReport(busy_s=1.0, wait_s=0.5, waits_s={"0X_INSERT": 0.5}, actions=3)
    values = Meter(0.0).measure(2.0, progress(lanes={"compute": waits}, loss_sum=torch.tensor(0.0)), None)
    assert values["waited_for"] == {"on": "cache copies", "lane": "copy", "op": "X_INSERT"}
    assert values["lanes"] == {"compute": {"busy_s": 1.0, "waits_s": {"0X_INSERT": 0.5}}}


@pytest.mark.parametrize(
    ("limit", "steps", "epochs", "expected"),
    [(0, 0, 1, None), (0, 7, 1, 7), (105, 0, 1, 10), (105, 0, 3, 30), (105, 7, 3, 7), (105, 70, 3, 30)],
)
def test_the_steps_that_a_configuration_tells(limit: int, steps: int, epochs: int, expected: int | None) -> None:
    """105 rows: 10 are held out, and the last of 10 batches is smaller."""
    data = DataConfig(limit=limit, batch_size=10, epochs=epochs, eval_fraction=0.1)
    assert planned_steps(Config(data=data, run=RunConfig(steps=steps))) == expected
