"""Checks of the expiry of rows: data.expire_after and the keys that depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from bagpipe.config.row_rules import by_table_problem, imported_rows, unused_problem
from bagpipe.config.sections import Config

__all__ = ["EXPIRY_PROBLEMS"]


def _is_limit(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False


def _by_table_problem(config: Config) -> str | None:
    return by_table_problem(
        config.data.expire_after_by_table, _is_limit, "TABLE=NUMBER, the number at least 0 (0: never)"
    )


def _expire_after_problem(config: Config) -> str | None:
    data = config.data
    if not data.expires:
        return None
    if data.is_stream:
        return "is not possible with a stream: a resumed job follows rows from the first batch on, which can be gone"
    if config.cacher.shards:
        return "is not possible with cacher.shards: one process follows the uses of rows"
    if config.pipeline.rows_delay:
        return "is not possible with pipeline.rows_delay 1: rows are deleted between two batches"
    if data.use_counts == "sketch":
        return "is not possible with data.use_counts sketch, which cannot forget the uses of a row: use exact"
    imported = imported_rows(config)
    if imported is not None:
        return f"needs a job that begins without rows, got {imported}: nobody followed the uses of the rows there"
    return None


def _unused_problem(name: str) -> Callable[[Config], str | None]:
    needs = "data.expire_after above 0, for all tables or one, got 0"
    return unused_problem(name, lambda data: data.expires, needs)


#: Key that a message begins with -> the rest of the message, or None if the configuration is consistent.
EXPIRY_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "data.expire_after_by_table": _by_table_problem,
    "data.expire_after": _expire_after_problem,
    "data.expire_unit": _unused_problem("expire_unit"),
    "data.expire_every": _unused_problem("expire_every"),
}
