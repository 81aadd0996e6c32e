"""XXH3-64 of Arrow strings: ids that are the same in every process, on every machine and in every version.

    strings of any Arrow layout ──as_binary──> bytes ──xxh3_64(bytes, seed)──> int64

The output of XXH3 is fixed since version 0.8 of the xxHash library. A serving system computes the same id by
``xxhash.xxh3_64_intdigest(text.encode(), seed)``, read as a signed 64-bit integer.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

__all__ = ["as_binary", "hash_strings", "is_text"]


def hash_strings(strings: pa.Array, seed: int = 0) -> NDArray[np.int64]:
    """The hash of each string, int64 ``[n]``.

    Args:
        strings: strings or binary, without nulls.
        seed: from 0 to 2**64 - 1.
    """
    texts = as_binary(strings).to_numpy(zero_copy_only=False)
    hashes = map(xxhash.xxh3_64_intdigest, texts, repeat(seed))  # about 0.1 us a string, in C
    return np.fromiter(hashes, np.uint64, len(texts)).view(np.int64)


def as_binary(strings: pa.Array) -> pa.Array:
    """Strings of any Arrow layout as plain binary, nulls included; functions on nulls do not take all layouts."""
    if pa.types.is_dictionary(strings.type):
        return as_binary(strings.dictionary).take(strings.indices)  # a null can be in either
    return strings if pa.types.is_binary(strings.type) else strings.cast(pa.binary())


def is_text(kind: pa.DataType) -> bool:
    """Whether columns of an Arrow type hold strings or binary, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )
