"""Rows as lists of append numbers, and back: `[length | numbers | zeros | seal]`, float32. Pure.

The seal is a checksum over length and numbers. A row of two writes has another seal, or a number behind its length.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import ReadResult
from bagpipe.types.schema import RowSchema, RowTable

__all__ = ["CAPACITY", "NUM_ROWS", "SCHEMA", "Lists", "decode", "encode"]

#: Lists of append numbers by row.
Lists = Mapping[int, tuple[int, ...]]

NUM_ROWS = 12
_DIM = 128
#: Numbers that a row holds.
CAPACITY = _DIM - 2
#: Whole numbers below this are exact in float32.
_EXACT = 1 << 24

SCHEMA = RowSchema(tables=(RowTable(name="lists", dim=_DIM),), optimizer="sgd", seed=1)


def encode(lists: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Records of rows, float32 ``[n, 128]``.

    Raises:
        ValueError: a list is longer than `CAPACITY`, or a number is not from 1 to 2^24 - 1.
    """
    rows = np.zeros((len(lists), _DIM), np.float32)
    for record, numbers in zip(rows, lists, strict=True):
        if len(numbers) > CAPACITY or not all(0 < number < _EXACT for number in numbers):
            raise ValueError(f"expected at most {CAPACITY} numbers from 1 to {_EXACT - 1}, got {numbers}")
        record[0] = len(numbers)
        record[1 : 1 + len(numbers)] = numbers
        record[-1] = _seal(record)
    return rows


def decode(ids: Sequence[int], result: ReadResult) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """The lists of rows, empty for rows that are not there, and the ids of rows that no single write made."""
    lists: dict[int, tuple[int, ...]] = {}
    torn = []
    for row, record, found in zip(ids, result.rows, result.found, strict=True):
        numbers = _numbers(record) if found else ()
        if numbers is None:
            torn.append(row)
        else:
            lists[row] = numbers
    return lists, torn


def _numbers(record: NDArray[np.float32]) -> tuple[int, ...] | None:
    if record[-1] != _seal(record) or not 0 <= record[0] <= CAPACITY:
        return None
    length = int(record[0])
    return tuple(int(number) for number in record[1 : 1 + length])


def _seal(record: NDArray[np.float32]) -> int:
    return zlib.crc32(record[:-1].tobytes()) % _EXACT
