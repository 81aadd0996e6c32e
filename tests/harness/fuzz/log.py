"""`Log`: a click log to be written in some format, as a frozen record; `Examples`: its values.

Log(format, columns, tables, laws …) ──examples──> Examples: labels, dense values, ids per column
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.schema import Table

__all__ = ["BAG_LENGTHS", "ID_LAWS", "LABEL_LAWS", "Column", "Examples", "Log", "examples"]

#: Laws of a column's ids: a few hot ones; every id once; the same id everywhere; uniform.
ID_LAWS = ("hot", "distinct", "equal", "uniform")
#: Ids in a bag: one, or missing; up to three; up to twelve, duplicates included.
BAG_LENGTHS = {"one": 1, "short": 3, "long": 12}
#: Labels: clicks; one class only; probabilities.
LABEL_LAWS = ("clicks", "one-class", "soft")

#: Ids at the edges of 64 bits.
_EDGES = (-(2**63), -1, 0, 1, 2**63 - 1)
#: A dense value whose square overflows float32.
EXTREME = 3e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One sparse column.

    Attributes:
        name: of the feature.
        table: of its ids.
        law: one of `ID_LAWS`.
        vocabulary: number of different ids of the laws hot and uniform.
        bag: a key of `BAG_LENGTHS`.
        missing: share of empty bags.
        weighted: every id has a weight.
    """

    name: str
    table: str
    law: str = "hot"
    vocabulary: int = 40
    bag: str = "one"
    missing: float = 0.1
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The data of a job.

    Attributes:
        format: value of ``data.format``.
        shape: form of the file, a key of `tests.harness.fuzz.log_files.SHAPES` of the format.
        seed: of the values.
        num_examples: good ones.
        num_bad: malformed rows among them.
        num_dense: dense columns, for the formats that do not fix them.
        columns: sparse columns, in order.
        tables: of the columns.
        labels: one of `LABEL_LAWS`.
        extreme: share of examples whose first dense value is near float32's end.
        least: the smallest id of tables without bounds.
    """

    format: str
    shape: str
    seed: int
    num_examples: int
    num_bad: int = 0
    num_dense: int = 2
    columns: tuple[Column, ...]
    tables: tuple[Table, ...]
    labels: str = "clicks"
    extreme: float = 0.0
    least: int = -(2**63)

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Values of a log.

    Attributes:
        labels: float32 ``[n]``.
        dense: float32 ``[n, num_dense]``.
        bags: by column, a list of n lists of ids.
        weights: by weighted column, lists of the same lengths.
        bad: ascending positions before which a malformed row stands.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    bags: Mapping[str, list[list[int]]]
    weights: Mapping[str, list[list[float]]]
    bad: tuple[int, ...]


def examples(log: Log, *, low: int = -(2**63), high: int = 2**63 - 1) -> Examples:
    """The values. Pure.

    Args:
        log: the record.
        low, high: smallest and largest id that the format can write into a table without bounds.
    """
    rng = np.random.default_rng(log.seed)
    n, low = log.num_examples, max(low, log.least)
    dense = rng.standard_normal((n, log.num_dense)).astype(np.float32)
    if log.num_dense and log.extreme:
        dense[rng.random(n) < log.extreme, 0] = EXTREME
    bags, weights = {}, {}
    for column in log.columns:
        table = log.table(column.table)
        bound = table.rows if table.rows is not None and not table.hash else None
        lengths = rng.integers(1, BAG_LENGTHS[column.bag] + 1, size=n) * (rng.random(n) >= column.missing)
        ids = _ids(column, int(lengths.sum()), rng, low=0 if bound else low, high=bound - 1 if bound else high)
        ends = np.cumsum(lengths)
        bags[column.name] = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        if column.weighted:
            drawn = rng.standard_normal(len(ids)).astype(np.float32).tolist()
            weights[column.name] = [drawn[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    chance = 1 / (1 + np.exp(-rng.standard_normal(n)))
    labels = {
        "clicks": (rng.random(n) < chance).astype(np.float32),
        "one-class": np.zeros(n, np.float32),
        "soft": chance.astype(np.float32),
    }[log.labels]
    bad = tuple(sorted(int(position) for position in rng.integers(0, n + 1, size=log.num_bad)))
    return Examples(labels=labels, dense=dense, bags=bags, weights=weights, bad=bad)


def _ids(column: Column, count: int, rng: np.random.Generator, *, low: int, high: int) -> list[int]:
    """So many ids in ``[low, high]``."""
    size = min(column.vocabulary, high - low + 1)
    if high - low < 2**20:
        words = [low + int(number) for number in rng.permutation(high - low + 1)]
    else:
        drawn = rng.integers(low, high, size=max(size, count), dtype=np.int64, endpoint=True)
        words = [*dict.fromkeys([*(edge for edge in _EDGES if low <= edge <= high), *(int(word) for word in drawn)])]
    if column.law == "distinct":
        return [words[number % len(words)] for number in range(count)]
    if column.law == "equal":
        return [words[0]] * count
    drawn = rng.geometric(min(1.0, 4.0 / size), size=count) - 1 if column.law == "hot" else rng.integers(0, size, count)
    return [words[min(int(number), size - 1, len(words) - 1)] for number in drawn]
