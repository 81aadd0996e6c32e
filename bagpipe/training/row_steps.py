"""`row_steps_of`: the row optimizers of a model as settings of a batch's updates, for `Engine(row_steps=…)`.

optimizers by table ──layout──> one per table group ──rate of batch b──> `RowStep` per group
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.optim import RowOptimizer
from bagpipe.training.rows import RowStepsOfBatch

__all__ = ["row_steps_of"]


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
