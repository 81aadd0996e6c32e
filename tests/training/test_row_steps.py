"""Settings of row updates by table group. Whole jobs with them: `tests/system/test_row_optimizers.py`."""

from __future__ import annotations

import pytest

from bagpipe.cache.lookup_layout import LookupLayout, TableLookup, build_layout
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.optim import SGD, Adam, Frozen, RowOptimizer, settings_of
from bagpipe.oracle.plan import FeatureRef
from bagpipe.training.part import EarlierSteps
from bagpipe.training.row_steps import going_on, row_steps_of
from bagpipe.types.schema import RowTable


def layout_of(optimizers: list[RowOptimizer], *, split: bool = True) -> LookupLayout:
    tables = [
        RowTable(name=str(number), dim=4, optimizer=optimizer.name) for number, optimizer in enumerate(optimizers)
    ]
    features = [FeatureRef(feature=number, table=number) for number in range(len(tables))]
    lookups = [TableLookup()] * len(tables)
    return build_layout(tables, features, lookups, settings_of(optimizers) if split else None)


def test_each_group_has_the_settings_of_its_tables() -> None:
    optimizers = [SGD(0.1), SGD(0.1), SGD(0.2), Adam(lambda step: 1 / (2 + step), eps=1e-3), Frozen()]
    layout = layout_of(optimizers)
    assert [(group.first_table, group.end_table) for group in layout.groups] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [group.is_frozen for group in layout.groups] == [False, False, False, True]
    assert row_steps_of(layout, optimizers)(2) == (
        RowStep(lr=0.1, eps=0.0, step=3),
        RowStep(lr=0.2, eps=0.0, step=3),
        RowStep(lr=0.25, eps=1e-3, step=3),
        RowStep(lr=0.0, eps=0.0, step=3),
    )


def test_a_layout_without_the_settings_is_refused() -> None:
    optimizers: list[RowOptimizer] = [SGD(0.1), SGD(0.2)]
    with pytest.raises(InputError, match="tables number 0 to 1 are updated together: expected one optimizer, got"):
        row_steps_of(layout_of(optimizers, split=False), optimizers)


def test_an_invalid_rate_is_refused_when_its_batch_begins() -> None:
    optimizers: list[RowOptimizer] = [SGD(lambda step: 1.0 - step)]
    steps = row_steps_of(layout_of(optimizers), optimizers)
    assert steps(1)[0].lr == 0.0
    with pytest.raises(InputError, match=r"SGD: lr must be a finite number of at least 0 at step 2, got -1\.0"):
        steps(2)


@pytest.mark.parametrize("shared", [True, False])
def test_a_job_goes_on_counting(shared: bool) -> None:
    def steps_of(b: int) -> RowStep | tuple[RowStep, ...]:
        step = RowStep(lr=0.5**b, eps=0.1, step=b + 1)
        return step if shared else (step, step)

    assert going_on(steps_of, EarlierSteps()) is steps_of
    expected = RowStep(lr=0.5**12, eps=0.1, step=1003)
    assert going_on(steps_of, EarlierSteps(schedule=10, rows=1000))(2) == (expected if shared else (expected,) * 2)
