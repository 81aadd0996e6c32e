"""Placement of rows: pure functions from (table number, id) to bucket, field and key. No loops over ids.

    (table, id) ──bucket_of──> bucket b ──> key    <namespace>:{b}         one hash per bucket
                │                           └─key_slot──> hash slot         of a Redis Cluster
                └─FIELD_DTYPE─> field: table number uint32 BE, id int64 BE  12 bytes

These functions are part of the stored format: a changed constant orphans every stored row and needs a new
`FORMAT_VERSION`. Fields are big-endian, so a hex dump shows the two numbers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, StoreError
from bagpipe.types.splitmix64 import mix_rows

__all__ = [
    "FIELD_BYTES",
    "FIELD_DTYPE",
    "FORMAT_VERSION",
    "MAX_BUCKETS",
    "NUM_SLOTS",
    "bucket_key",
    "bucket_of",
    "check_layout",
    "decode_fields",
    "key_slot",
    "meta_key",
]

#: Version of the stored layout: keys, fields and values. 2: a check word behind each record, logs beside the buckets.
FORMAT_VERSION = 2

#: A hash field: the table number, then the id.
FIELD_DTYPE = np.dtype([("table", ">u4"), ("id", ">i8")])
FIELD_BYTES = FIELD_DTYPE.itemsize

#: Bucket numbers are sorted as uint16 (numpy's stable sort of 16-bit words is a radix sort).
MAX_BUCKETS = 1 << 16

#: Hash slots of a Redis Cluster.
NUM_SLOTS = 1 << 14

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:/@+=-]{1,200}")


def check_layout(namespace: str, num_buckets: int) -> None:
    """Validate `store.namespace` and `store.buckets`.

    Raises:
        InputError: an invalid value.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise InputError(
            f"store.namespace must be 1 to 200 letters, digits or any of _.:/@+=- (braces mark the bucket), "
            f"got {namespace!r}"
        )
    if not 1 <= num_buckets <= MAX_BUCKETS or num_buckets & (num_buckets - 1):
        raise InputError(f"store.buckets must be a power of two from 1 to {MAX_BUCKETS}, got {num_buckets}")


def bucket_of(tables: NDArray[np.uint32], ids: NDArray[np.int64], num_buckets: int) -> NDArray[np.uint16]:
    """Bucket of each row: the high bits of splitmix64 over id and table number.

    Args:
        tables: table numbers, uint32, ``[n]`` or broadcastable to it.
        ids: int64 ``[n]``, any value.
        num_buckets: a power of two.

    Returns:
        uint16 ``[n]``, in ``[0, num_buckets)``.
    """
    if num_buckets == 1:
        return np.zeros(ids.shape, np.uint16)
    return (mix_rows(tables, ids) >> np.uint64(65 - num_buckets.bit_length())).astype(np.uint16)


def bucket_key(namespace: str, bucket: int) -> bytes:
    """Key of a bucket's hash. The braces make the bucket number the key's hash tag in a Redis Cluster."""
    return f"{namespace}:{{{bucket}}}".encode()


def meta_key(namespace: str) -> bytes:
    """Key of the namespace's schema record."""
    return f"{namespace}:meta".encode()


def key_slot(key: bytes) -> int:
    """Hash slot of a key in a Redis Cluster: CRC16 (XMODEM) of the tag between braces, or of the key if it has none."""
    start = key.find(b"{")
    stop = key.find(b"}", start + 1)
    tag = key[start + 1 : stop] if start >= 0 and stop > start + 1 else key
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


def decode_fields(fields: Sequence[bytes]) -> NDArray[np.void]:
    """Fields of a bucket as an array of `FIELD_DTYPE`.

    Raises:
        StoreError: a field is not 12 bytes long, so another program wrote into the bucket.
    """
    joined = b"".join(fields)
    if any(len(field) != FIELD_BYTES for field in fields):
        strange = next(field for field in fields if len(field) != FIELD_BYTES)
        raise StoreError(f"a bucket holds a field of {len(strange)} bytes, expected {FIELD_BYTES}: {strange[:32]!r}")
    return np.frombuffer(joined, FIELD_DTYPE)
