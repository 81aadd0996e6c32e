"""`JobPlan`: the state of a source that a new job takes over, besides rows and dense weights. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagpipe.checkpoint.dense_state import PART, DenseState

__all__ = ["EARLIER_ROWS", "JobPlan", "part_tensors"]

#: Part whose tensors are of rows; their names have numbers of tables.
EARLIER_ROWS = "earlier_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The state that the new job takes over.

    Attributes:
        schedule_step: position of the schedules of learning rates at batch 0.
        dense_step: batches that the turns of the dense part count (`EarlierSteps.dense`).
        masks_step: batches that the stages' random numbers count (`EarlierSteps.masks`).
        takes_random: the ranks go on with the random states of the source's.
        progress: counters of each rank.
        parts: names of the parts whose tensors are taken.
        table_numbers: number of a table in the source's schema -> in the new job's, of the tables that are taken.
    """

    schedule_step: int = 0
    dense_step: int = 0
    masks_step: int = 0
    takes_random: bool = False
    progress: Mapping[str, Any] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    table_numbers: Mapping[int, int] = field(default_factory=dict)


def part_tensors(plan: JobPlan, theirs: DenseState) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the parts that are taken, by full name; numbers of tables are those of the new job."""
    for name, tensor in theirs.tensors.items():
        part, _, rest = name.removeprefix(PART).partition(".")
        if not name.startswith(PART) or part not in plan.parts:
            continue
        if part != EARLIER_ROWS:
            yield name, tensor
            continue
        *share, table, field_name = rest.split(".")
        if int(table) in plan.table_numbers:
            yield ".".join([f"{PART}{part}", *share, str(plan.table_numbers[int(table)]), field_name]), tensor
