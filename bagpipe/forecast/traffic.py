"""`RowTraffic`: rows that a batch of a log reads, writes and exchanges, from the records of a replay.

    python -m data replay … --json out.json ──read_traffic──> RowTraffic per setting
                                            ──unique_curve──> unique rows of a part of a batch

Counts are means over the log's batches. The log is taken as it is: a longer one has fewer new rows, and in a
later epoch their first use is a read (`RowTraffic.with_stored_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json

__all__ = ["RowTraffic", "UniqueCurve", "read_traffic", "unique_curve"]

#: Fields of a record that are counted over the log.
_COUNTS = ("ids", "rows_unique", "rows_first_touch", "rows_fetched", "rows_written", "evictions_waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraffic:
    """Rows per batch, of all ranks together.

    Attributes:
        policy, lookahead, cache_rows, batch_examples, ranks: the setting; `cache_rows` per rank.
        ids: occurrences of ids.
        unique: unique rows.
        new: rows that enter a cache for the first time. They need no read.
        fetched, written: rows read from the store and written to it.
        waiting: rows that leave a cache right after the batch that used them.
        row_bytes: of a record.
    """

    policy: str
    lookahead: int
    cache_rows: int
    batch_examples: int
    ranks: int
    ids: float
    unique: float
    new: float
    fetched: float
    written: float
    waiting: float
    row_bytes: float

    def with_stored_rows(self) -> RowTraffic:
        """The same log over rows that the store has already, as in a later epoch: first uses are reads."""
        return replace(self, fetched=self.fetched + self.new, new=0.0)

    def on_ranks(self, ranks: int) -> RowTraffic:
        """The same log with as many slots in all, shared by other ranks."""
        return replace(self, ranks=ranks, cache_rows=-(-self.total_cache_rows // ranks))

    def with_resident_rows(self, rows: int) -> RowTraffic:
        """The same log where the caches of all ranks together hold all rows for good, as sharded tables do."""
        return replace(
            self, policy="resident", ranks=1, cache_rows=rows, fetched=0.0, new=0.0, written=0.0, waiting=0.0
        )

    @property
    def total_cache_rows(self) -> int:
        """Slots of all ranks."""
        return self.cache_rows * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniqueCurve:
    """Unique rows and ids of a batch by its examples, interpolated between the batch sizes of a replay.

    Attributes:
        examples: float64, ascending.
        unique, ids: float64, of batches of these sizes.
    """

    examples: NDArray[np.float64]
    unique: NDArray[np.float64]
    ids: NDArray[np.float64]

    def unique_at(self, examples: ArrayLike) -> NDArray[np.float64]:
        """Unique rows of batches of other sizes: a power law between two sizes and beyond them (Heaps, 1978).

        At most as many as there are ids.
        """
        wanted = np.maximum(np.asarray(examples, np.float64), 1e-9)
        found = np.exp(_line(np.log(wanted), np.log(self.examples), np.log(self.unique)))
        bounded: NDArray[np.float64] = np.minimum(found, self.ids_at(wanted))
        return bounded

    def ids_at(self, examples: ArrayLike) -> NDArray[np.float64]:
        """Ids of batches of other sizes: in proportion."""
        per_example = float(self.ids[-1] / self.examples[-1])
        found: NDArray[np.float64] = np.asarray(examples, np.float64) * per_example
        return found


def _line(at: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Piecewise linear, with the outer pieces going on."""
    if x.size == 1:
        proportional: NDArray[np.float64] = y[0] + (at - x[0])
        return proportional
    piece = np.clip(np.searchsorted(x, at) - 1, 0, x.size - 2)
    slope = (y[1:] - y[:-1]) / (x[1:] - x[:-1])
    found: NDArray[np.float64] = y[piece] + slope[piece] * (at - x[piece])
    return found


def read_traffic(text: str, *, source: str) -> tuple[RowTraffic, ...]:
    """The settings of a replay that succeeded and can be trained with.

    Args:
        text: the file that `data replay --json` wrote.
        source: its name, for errors.

    Raises:
        InputError: it is no such file, or has no such setting; one line.
    """
    try:
        records = parse_json(text)
    except ValueError as error:
        raise InputError(f"{source}: not JSON: {error}") from None
    if isinstance(records, dict):
        records = records.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(f"{source}: expected a list of records, as `data replay --json` writes it")
    try:
        found = tuple(_traffic(record) for record in records if record.get("error") is None and _is_plain(record))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{source}: expected records of `data replay --json`, got one without {error}") from None
    if not found:
        raise InputError(f"{source}: expected a record that succeeded, with rows of one size, got none")
    return found


def _is_plain(record: dict[str, Any]) -> bool:
    return record.get("evictions_waiting") is not None and record.get("row_bytes") is not None


def _traffic(record: dict[str, Any]) -> RowTraffic:
    ids, unique, new, fetched, written, waiting = (record[name] / record["batches"] for name in _COUNTS)
    return RowTraffic(
        policy=record["policy"],
        lookahead=record["lookahead"],
        cache_rows=record["cache_rows"],
        batch_examples=record["batch_size"],
        ranks=record["world_size"],
        ids=ids,
        unique=unique,
        new=new,
        fetched=fetched,
        written=written,
        waiting=waiting,
        row_bytes=float(record["row_bytes"]),
    )


def unique_curve(traffic: Iterable[RowTraffic]) -> UniqueCurve:
    """The unique rows by batch size of some settings of one log.

    Raises:
        ValueError: there is no setting.
    """
    sizes: dict[int, RowTraffic] = {each.batch_examples: each for each in traffic}
    chosen: Sequence[RowTraffic] = [sizes[size] for size in sorted(sizes)]
    if not chosen:
        raise ValueError("expected at least one setting, got none")
    return UniqueCurve(
        examples=np.array([each.batch_examples for each in chosen], np.float64),
        unique=np.array([max(each.unique, 1e-9) for each in chosen]),
        ids=np.array([each.ids for each in chosen]),
    )
