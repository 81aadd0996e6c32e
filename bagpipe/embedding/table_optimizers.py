"""`TableOptimizers`: the row optimizers of a model's tables while these are numbered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bagpipe.optim import RowOptimizer, RowOptimizers, optimizers_of, settings_of, shared_optimizer
from bagpipe.types.schema import RowTable

__all__ = ["TableOptimizers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptimizers:
    """Row optimizers by table name.

    Attributes:
        by_table: of every table; empty: all tables have that of the row schema.
        shared: name of the row schema's optimizer; None: the caller's choice.
    """

    by_table: Mapping[str, RowOptimizer]
    shared: str | None

    @classmethod
    def of(cls, rows: RowOptimizers | None, names: Sequence[str]) -> TableOptimizers:
        """The optimizers of the tables `names`; None: all have that of the row schema.

        Raises:
            InputError: see `bagpipe.optim.optimizers_of`.
        """
        if rows is None:
            return cls(by_table={}, shared=None)
        found = optimizers_of(rows, names)
        return cls(by_table=dict(zip(names, found, strict=True)), shared=shared_optimizer(found))

    def name(self, table: str) -> str | None:
        """Name of the table's optimizer for `RowTable.optimizer`; None: the row schema's."""
        optimizer = self.by_table.get(table)
        return None if optimizer is None or optimizer.record == self.shared else optimizer.record

    def named(self, tables: Iterable[RowTable]) -> tuple[RowTable, ...]:
        """The tables with the names of their optimizers."""
        return tuple(replace(table, optimizer=self.name(table.name)) for table in tables)

    def ordered(self, names: Sequence[str]) -> tuple[RowOptimizer, ...]:
        """The optimizers in the order of `names`; none if all tables have that of the row schema."""
        return tuple(self.by_table[name] for name in names) if self.by_table else ()

    def settings(self, names: Sequence[str]) -> tuple[int, ...] | None:
        """See `bagpipe.optim.settings_of`; None: all are equal."""
        return settings_of(self.ordered(names)) if self.by_table else None
