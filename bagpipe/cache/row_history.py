"""`RowHistory`: the decay of the rows of each table since batch 0. Empty if no rows decay.

    training   settings of batch b ──note──> one `DecayTable` per table group     <──state, load──> checkpoint
    reading    rows, step they are at ──catch_up──> weights as of now             evaluation, export, `TableRows`

Records in caches, stores and checkpoints are as their last update left them, with the step of that update. A reader
brings the weights up to the present, on a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowSteps, step_of
from bagpipe.kernels.row_decay import DecayTable, Missed, decay_factor, row_steps
from bagpipe.kernels.row_l2 import L2Table
from bagpipe.types.schema import L2_DECAYED, RowSchema, base_optimizer

__all__ = ["RowHistory"]

_TABLES = "tables"

_Table: TypeAlias = DecayTable | L2Table


class RowHistory:
    """History of the tables of one schema.

    Args:
        schema: of the rows.
        device: device of the rows.

    Attributes:
        decaying: numbers of the tables whose rows decay.
        num_steps: batches noted.
    """

    #: Names its tensors in checkpoints.
    name = "decay"

    def __init__(self, schema: RowSchema, device: torch.device) -> None:
        numbers = range(len(schema.tables))
        self.decaying = frozenset(number for number in numbers if base_optimizer(schema.optimizer_of(number))[1])
        self.num_steps = 0
        self._schema = schema
        self._device = device
        self._tables: dict[int, _Table] = {}

    def begin(self, layout: LookupLayout, num_steps: int) -> None:
        """Begin to note batches, with one table per table group.

        Args:
            layout: table groups.
            num_steps: batches trained before; later ones are forgotten.

        Raises:
            InputError: fewer batches are known, or tables that are updated together had different rates.
        """
        if not self.decaying:
            return
        if self.num_steps < num_steps:
            raise InputError(
                f"rows decay: expected the rates of the {num_steps} batches before, the checkpoint has {self.num_steps}"
            )
        for group in layout.groups:
            members = [number for number in range(group.first_table, group.end_table) if number in self.decaying]
            before = [self._factors(number, num_steps) for number in members]
            for number, factors in zip(members, before, strict=True):
                if not np.array_equal(factors, before[0]):
                    names = [self._schema.tables[each].name for each in (members[0], number)]
                    raise InputError(f"tables {names} decayed at different rates before: expected different rates now")
            if members:
                self._tables.update(dict.fromkeys(members, self._table(members[0], before[0])))
        self.num_steps = num_steps

    def note(self, layout: LookupLayout, steps: RowSteps) -> None:
        """Add the settings of the next batch, whose rows may be read from now on.

        Raises:
            InputError: a rate times a decay is not below 1.
        """
        for group in layout.groups:
            if group.first_table in self.decaying:
                step, table = step_of(steps, group.index), self._tables[group.first_table]
                if isinstance(table, L2Table):
                    table.append(step)
                else:
                    table.append(decay_factor(step.lr, step.weight_decay))
        self.num_steps += 1

    def missed(self, table: int, until: int | None = None) -> Missed | None:
        """The decay of a table's rows up to batch `until` (None: now). Returns None if they do not decay."""
        found = self._tables.get(table)
        if found is None:
            return None
        return Missed(table=found, until=self.num_steps if until is None else until)

    def catch_up(self, table: int, records: Tensor, until: int | None = None) -> None:
        """Apply the decay that records ``[n, width]`` on the host have missed, in place; not the step they are at."""
        missed = self.missed(table, until)
        if missed is not None:
            missed.apply(records, self._schema.tables[table].dim, self.steps_of(table, records).long())

    def steps_of(self, table: int, records: Tensor) -> Tensor:
        """The steps that rows of a decaying table are at: a view ``[n]`` of records, as integers."""
        return row_steps(records, self._schema.row_width(table) - 1)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self, num_steps: int) -> Mapping[str, Tensor]:
        """Tensors that a checkpoint before batch `num_steps` keeps; none if no rows decay.

        ``factors.<k>`` float64 ``[num_steps]``, with L2 decay ``[num_steps, 5]``; and ``tables`` int64 ``[tables]``: k
        of each table, -1 for none.
        """
        if not self.decaying:
            return {}
        tables = [self._tables[number] for number in sorted(self._tables)]
        places = {table: k for k, table in enumerate(dict.fromkeys(tables))}  # tables of a group share one
        numbers = [places[self._tables[n]] if n in self._tables else -1 for n in range(len(self._schema.tables))]
        found = {f"factors.{k}": torch.from_numpy(table.state(num_steps)) for table, k in places.items()}
        return {**found, _TABLES: torch.tensor(numbers, dtype=torch.int64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tensors of `state`; none: of a job that begins.

        Raises:
            InputError: they are of other tables.
        """
        if not tensors:
            return
        numbers: Sequence[int] = tensors[_TABLES].tolist() if _TABLES in tensors else []
        if {number for number, k in enumerate(numbers) if k >= 0} != self.decaying:
            raise InputError("the checkpoint's rows decay in other tables than this job's")
        found = [
            self._table(numbers.index(k), tensors[f"factors.{k}"].numpy()) for k in range(max(numbers, default=-1) + 1)
        ]
        self._tables = {number: found[k] for number, k in enumerate(numbers) if k >= 0}
        self.num_steps = len(found[0]) if found else 0

    def _factors(self, table: int, num_steps: int) -> NDArray[np.float64]:
        found = self._tables.get(table)
        return np.empty(0) if found is None else found.state(num_steps)

    def _table(self, number: int, state: NDArray[np.float64]) -> _Table:
        """A table with the batches that a state has."""
        name = self._schema.optimizer_of(number)
        rule, _ = base_optimizer(name)
        if not name.endswith(L2_DECAYED):
            return DecayTable(self._device, state)
        if self._device.type != "cpu":
            raise InputError(f"L2 decay of rows with {rule} needs run.device cpu, got {self._device}")
        return L2Table(rule, state if len(state) else None)
