"""Checks of the admission of rows: data.min_uses and the keys that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config.optim_section import pairs
from bagpipe.config.row_rules import by_table_problem, imported_rows, unused_problem
from bagpipe.config.sections import Config, DataConfig
from bagpipe.types.schema import FROZEN

__all__ = ["ADMISSION_PROBLEMS", "counts_uses"]

#: Uses of a row are counted up to here.
_MOST_USES = (1 << 31) - 1


def counts_uses(config: DataConfig) -> bool:
    """A table needs more than one use of a row."""
    return config.min_uses > 1 or any(uses != "1" for _, uses in pairs(config.min_uses_by_table))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_USES


def _by_table_problem(config: Config) -> str | None:
    return by_table_problem(config.data.min_uses_by_table, _is_count, "TABLE=USES, the uses from 1 to 2**31 - 1")


def _min_uses_problem(config: Config) -> str | None:
    data = config.data
    if not counts_uses(data):
        return None
    if data.is_stream:
        return "is not possible with a stream: a resumed job counts from the first batch on, which can be gone"
    if config.cacher.shards:
        return "is not possible with cacher.shards: one process counts the uses of rows"
    imported = imported_rows(config)
    if imported is not None:
        return f"needs a job that begins without rows, got {imported}: nobody counted the uses of the rows there"
    own = dict(pairs(data.min_uses_by_table))
    for table, optimizer in pairs(config.optim.rows_by_table):
        if optimizer == FROZEN and int(own.get(table, data.min_uses)) > 1:
            return f"must be 1 for table {table!r}, whose rows optim.rows_by_table freezes: none of them is created"
    return None


def _unused_problem(name: str) -> Callable[[Config], str | None]:
    return unused_problem(name, counts_uses, "data.min_uses above 1, for all tables or one, got 1")


def _sketch_problem(config: Config) -> str | None:
    cells = config.data.sketch_cells
    if cells == DataConfig.sketch_cells or config.data.use_counts == "sketch":
        return None
    return f"{cells} needs data.use_counts sketch, got {config.data.use_counts}"


#: Key that a message begins with -> the rest of the message, or None if the configuration is consistent.
ADMISSION_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "data.min_uses_by_table": _by_table_problem,
    "data.min_uses": _min_uses_problem,
    "data.default_row": _unused_problem("default_row"),
    "data.use_counts": _unused_problem("use_counts"),
    "data.sketch_cells": _sketch_problem,
}
