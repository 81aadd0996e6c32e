"""`TableDtypes`: the dtypes of a model's row weights while its tables are numbered.

row_dtype: for all tables, or by table name ──> over ──> dtype that each table is configured with ──> `RowTable.dtype`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from bagpipe.errors import InputError
from bagpipe.types.schema import ROW_TYPES, RowTable

__all__ = ["RowDtypes", "TableDtypes"]

#: One dtype for all tables, or one per table name; the name ``"*"`` stands for all tables that are not named.
RowDtypes: TypeAlias = str | Mapping[str, str]

_OTHERS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDtypes:
    """Dtypes of the weights by table name, keys of `ROW_TYPES`.

    Attributes:
        by_table: of every table.
        shared: for `RowSchema.dtype`: that of most tables; the first of several.
    """

    by_table: Mapping[str, str]
    shared: str

    @classmethod
    def of(cls, given: RowDtypes | None, configured: Mapping[str, str], *, compute: str) -> TableDtypes:
        """The dtypes of the tables.

        Args:
            given: replaces the configured dtype, of the tables that it names; None: of none.
            configured: dtype of every table, by name.
            compute: dtype of the dense part.

        Raises:
            InputError: `given` names an unknown table or dtype, or half rows come with a dense part of float64.
        """
        named = given if isinstance(given, Mapping) else {} if given is None else {_OTHERS: given}
        unknown = [name for name in named if name != _OTHERS and name not in configured]
        if unknown:
            raise InputError(f"row_dtype names table {unknown[0]!r}, the model has {list(configured)}")
        for name, dtype in named.items():
            if dtype not in ROW_TYPES:
                where = "" if name == _OTHERS else f" of table {name!r}"
                raise InputError(f"row_dtype{where} must be one of {', '.join(ROW_TYPES)}, got {dtype!r}")
        found = {name: named.get(name, named.get(_OTHERS, own)) for name, own in configured.items()}
        for name, dtype in found.items():
            if ROW_TYPES[dtype].is_half and compute != ROW_TYPES[dtype].compute:
                raise InputError(
                    f"table {name!r}: rows of {dtype} need a dense part of {ROW_TYPES[dtype].compute}, got {compute}"
                )
        counts = Counter(found.values())
        return cls(by_table=found, shared=counts.most_common(1)[0][0] if counts else compute)

    def name(self, table: str) -> str | None:
        """Dtype of the table for `RowTable.dtype`; None: the row schema's."""
        dtype = self.by_table[table]
        return None if dtype == self.shared else dtype

    def named(self, tables: Iterable[RowTable]) -> tuple[RowTable, ...]:
        """The tables with their dtypes."""
        return tuple(replace(table, dtype=self.name(table.name)) for table in tables)
