"""Settings of a batch's row updates, for `Engine(row_steps=…)`.

optimizers by table ──row_steps_of, layout──> one per table group ──rate of batch b──> `RowStep` per group
                                                       └──going_on──> counted on from earlier jobs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep, RowSteps, map_steps
from bagpipe.optim import RowOptimizer
from bagpipe.training.part import EarlierSteps
from bagpipe.training.rows import RowStepsOfBatch

__all__ = ["going_on", "row_steps_of"]


def row_steps_of(layout: LookupLayout, optimizers: Sequence[RowOptimizer]) -> RowStepsOfBatch:
    """A function from the number of a batch, from 0, to the settings of its updates, by table group.

    It calls the learning rates that are functions, once per table group.

    Args:
        layout: made with the settings of these optimizers (`bagpipe.optim.settings_of`).
        optimizers: by table number.

    Raises:
        InputError: tables of one group have different optimizers; and, from the function, a rate is not valid.
    """
    of_groups = []
    for group in layout.groups:
        members = optimizers[group.first_table : group.end_table]
        if any(member != members[0] for member in members):
            raise InputError(
                f"tables number {group.first_table} to {group.end_table - 1} are updated together: expected one "
                f"optimizer, got {list(members)}"
            )
        of_groups.append(members[0])

    def steps(b: int) -> tuple[RowStep, ...]:
        return tuple(
            RowStep(lr=optimizer.rate(b), eps=optimizer.epsilon, step=b + 1, **optimizer.numbers)
            for optimizer in of_groups
        )

    return steps


def going_on(steps_of: RowStepsOfBatch, earlier: EarlierSteps) -> RowStepsOfBatch:
    """The same settings, counted on from earlier jobs: rates from theirs, steps from those of their rows."""
    if earlier == EarlierSteps():
        return steps_of

    def steps(b: int) -> RowSteps:
        return map_steps(
            steps_of(earlier.schedule + b), lambda step: dataclasses.replace(step, step=earlier.rows + b + 1)
        )

    return steps
