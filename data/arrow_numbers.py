"""Values of Arrow columns: of lists one after the other, of texts split, and read as integers or numbers.

column of any type ──flat_values──> lengths, values
"3|17|x" ──split_texts──> ["3", "17", "x"] ──as_ids──> [3, 17, 0] and the position 2
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data.string_hash import as_binary, is_text

__all__ = ["as_ids", "as_numbers", "flat_values", "is_list", "split_texts"]

_INTEGER = r"^-?[0-9]{1,18}$"
#: Longer texts, which may not fit. Texts of one length are ordered as their numbers are.
_NEGATIVE, _LEAST = r"^-[0-9]{19}$", b"-9223372036854775808"
_LONG = r"^[0-9]{19}$"
_LONGEST, _MOST = r"^[0-9]{20}$", b"18446744073709551615"
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"


def is_list(kind: pa.DataType) -> bool:
    """Whether a column has several values in a row."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flat_values(column: pa.ChunkedArray, separator: str = "") -> tuple[NDArray[np.int32] | None, pa.Array]:
    """The values of a column, one row after the other.

    Args:
        column: values, lists of them, or texts with a separator between them; of any Arrow layout.
        separator: of such texts; empty: none.

    Returns:
        of lists and such texts the number of values in each row, int32 ``[n]``, 0 for a null; else None. And the
        values, nulls included; texts are binary.
    """
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if separator:
        array = split_texts(array, separator)
    lengths = None
    if is_list(array.type):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
        array = array.flatten()
    return lengths, as_binary(array) if is_text(array.type) else array


def split_texts(texts: pa.Array, separator: str) -> pa.Array:
    """Texts as lists of binary. An empty text is an empty list, an empty part a null."""
    texts = as_binary(texts)
    empty = pc.equal(texts, b"")
    if pc.any(empty).as_py():
        texts = pc.if_else(empty, pa.scalar(None, pa.binary()), texts)
    lists = pc.split_pattern(texts, separator)
    parts = lists.flatten()
    empty = pc.equal(parts, b"")
    if not pc.any(empty).as_py():
        return lists
    parts = pc.if_else(empty, pa.scalar(None, pa.binary()), parts)
    bounds = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), parts)


def as_ids(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decimal integers from -2^63 to 2^64 - 1, int64 ``[n]``, those of 2^63 and more with the same bits, and the
    ascending positions of the texts that are none (0 there).
    """
    texts = as_binary(texts)
    good = pc.match_substring_regex(texts, _INTEGER)
    ids = pc.if_else(good, texts, b"0").cast(pa.string()).cast(pa.int64()).to_numpy(zero_copy_only=False)
    rest = np.flatnonzero(~good.to_numpy(zero_copy_only=False))
    if not rest.size:
        return ids, rest
    ids, texts = ids.copy(), texts.take(pa.array(rest))
    negative = pc.and_(pc.match_substring_regex(texts, _NEGATIVE), pc.less_equal(texts, _LEAST))
    longest = pc.and_(pc.match_substring_regex(texts, _LONGEST), pc.less_equal(texts, _MOST))
    positive = pc.or_(pc.match_substring_regex(texts, _LONG), longest)
    for fits, kind in ((negative, pa.int64()), (positive, pa.uint64())):
        found = texts.filter(fits).cast(pa.string()).cast(kind).to_numpy(zero_copy_only=False)
        ids[rest[fits.to_numpy(zero_copy_only=False)]] = found.view(np.int64)
    return ids, rest[~pc.or_(negative, positive).to_numpy(zero_copy_only=False)]


def as_numbers(texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Decimal numbers, a float32 array, and the ascending positions of the texts that are none (0 there)."""
    texts = as_binary(texts).fill_null(b"")
    good = pc.match_substring_regex(texts, _NUMBER)
    numbers = pc.if_else(good, texts, b"0").cast(pa.string()).cast(pa.float32())
    return numbers, np.flatnonzero(~good.to_numpy(zero_copy_only=False))
