"""`table_key`: the key of a table, from which the random words of its rows are made.

(seed, table name, purpose) ──blake2b──> 64 bits ──+ id, mixed──> words of one row

Initial values of rows depend on it: a changed key changes every row that was never trained.
"""

from __future__ import annotations

import hashlib

__all__ = ["signed", "table_key"]


def signed(value: int, bits: int) -> int:
    """The low `bits` bits as two's complement. torch has no unsigned arithmetic, but its signed arithmetic wraps."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def table_key(seed: int, name: str, *, purpose: str = "") -> int:
    """64-bit key of a table, as a signed integer: blake2b of the seed (int64, little-endian) and the name.

    Args:
        seed: seed of the job.
        name: name of the table.
        purpose: domain separation of keys, at most 16 bytes; empty: initial values.
    """
    text = signed(seed, 64).to_bytes(8, "little", signed=True) + name.encode()
    digest = hashlib.blake2b(text, digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little", signed=True)
