"""`EarlierRows`: weights of the latest batch's rows as they were before its update, by table and id.

    before the update of b       keep(rows)   ──> kept, replaced at the update of b + 1
    a checkpoint before b + 1    tensors()    ──load──> given     what the lookup of b + 1 reads: it leaves the update
    the first lookup after it    apply(rows)  <── given           of b out (`pipeline.rows_delay`)

In a run without an interruption the lookup itself comes before the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.slots import SlotTable
from bagpipe.errors import InputError
from bagpipe.oracle.plan import RowList
from bagpipe.types.schema import RowSchema

__all__ = ["EarlierRows"]


class EarlierRows:
    """Earlier weights of the rows of one cache. Two lanes keep rows of a batch, each its own *share* of them.

    Args:
        schema: tables.
        slots: the rows of the slots.
    """

    def __init__(self, schema: RowSchema, slots: SlotTable) -> None:
        self._schema = schema
        self._slots = slots
        self._kept: dict[tuple[str, int], tuple[RowList, Tensor]] = {}
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # table -> ids, ascending, and weights, on the host
        self._step: int | None = None

    def keep(self, share: str, group: int, rows: RowList, weights: Tensor) -> None:
        """Keep the rows of a table group in the place of those of an earlier batch.

        Args:
            share: of the batch's rows.
            group: number of the table group.
            rows: distinct rows.
            weights: ``[len(rows), dim]``, in their order; not changed later.
        """
        self._kept[share, group] = rows, weights

    def tensors(self) -> dict[str, Tensor]:
        """Ids int64 ``[n]`` of what is kept as ``SHARE.TABLE.ids``, its weights ``[n, dim]`` as ``….weights``."""
        found: dict[str, Tensor] = {}
        for (share, _), (rows, weights) in sorted(self._kept.items()):
            starts = rows.table_offsets.tolist()
            for table, (first, end) in enumerate(pairwise(starts)):
                if first < end:
                    found[f"{share}.{table}.ids"] = torch.from_numpy(rows.ids[first:end].copy())
                    found[f"{share}.{table}.weights"] = weights[first:end]
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `tensors` gave on every rank, under names that begin with anything.

        Raises:
            InputError: weights of a table have another shape or dtype.
        """
        by_table: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name in sorted(name for name in tensors if name.endswith(".ids")):
            table, ids = int(name.split(".")[-2]), tensors[name]
            weights = tensors.get(f"{name.removesuffix('ids')}weights")
            expected = [len(ids), self._schema.tables[table].dim]
            if weights is None or list(weights.shape) != expected:
                shape = "none" if weights is None else list(weights.shape)
                raise InputError(f"expected {expected} weights {name!r} of rows in the checkpoint, got {shape}")
            by_table.setdefault(table, []).append((ids, weights))
        self._given = {}
        for table, pieces in by_table.items():
            ids, weights = (torch.cat(column) for column in zip(*pieces, strict=True))
            order = torch.argsort(ids)
            self._given[table] = ids[order], weights[order]

    def begin(self, step: int) -> None:
        """Before a run whose first batch this is: the one that reads what was loaded, if it is the first run since."""
        if self._step is not None:
            self._given = {}
        self._step = step if self._given else None

    def is_read_by(self, step: int | None) -> bool:
        """Whether the lookups of a batch read rows from here."""
        return step is not None and step == self._step

    def apply(self, slot_index: Tensor, out: Tensor) -> None:
        """Put earlier weights in the place of those of the slots.

        Args:
            slot_index: int64 ``[n]``, slots.
            out: ``[n, dim]``, the weights of their rows.
        """
        slots = slot_index.cpu().numpy()
        tables, ids = self._slots.slot_table[slots], self._slots.slot_id[slots]
        for table in np.unique(tables).tolist():
            if table not in self._given:
                continue
            known, weights = self._given[table]
            places = np.flatnonzero(tables == table)
            wanted = torch.from_numpy(ids[places])
            found = torch.searchsorted(known, wanted).clamp_(max=len(known) - 1)
            matches = known[found] == wanted
            where = torch.from_numpy(places)[matches].to(out.device)
            out[where] = weights[found[matches]].to(out.device, out.dtype)
