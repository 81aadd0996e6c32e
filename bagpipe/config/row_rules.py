"""Checks that the rules of admission and expiry share: values by table, rows of other jobs, keys that do nothing."""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.config.optim_section import pairs
from bagpipe.config.sections import Config, DataConfig

__all__ = ["by_table_problem", "imported_rows", "unused_problem"]


def by_table_problem(items: tuple[str, ...], is_valid: Callable[[str], bool], expected: str) -> str | None:
    """Problem of ``TABLE=VALUE`` items; None: there is none.

    Args:
        items: of a key.
        is_valid: of a value.
        expected: form of an item, for the message.
    """
    tables = [table for table, _ in pairs(items)]
    for item, (table, value) in zip(items, pairs(items), strict=True):
        if not table or not is_valid(value):
            return f"must be {expected}, got {item!r}"
        if tables.count(table) > 1:
            return f"names table {table!r} more than once"
    return None


def imported_rows(config: Config) -> str | None:
    """The key and value by which a job begins with rows whose names no checkpoint has; None: with none."""
    return "store.existing rows-only" if config.store.existing == "rows-only" else None


def unused_problem(name: str, is_used: Callable[[DataConfig], bool], needs: str) -> Callable[[Config], str | None]:
    """Rule of a key of `data` that does nothing by itself.

    Args:
        name: of the key.
        is_used: the configuration has what the key is for.
        needs: what that is, and what there is instead, for the message.
    """

    def problem(config: Config) -> str | None:
        value = getattr(config.data, name)
        if value == getattr(DataConfig, name) or is_used(config.data):
            return None
        return f"{value} needs {needs}"

    return problem
