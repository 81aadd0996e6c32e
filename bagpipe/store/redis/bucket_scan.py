"""`bucket_fields`: the names of all rows of a bucket, by HSCAN or HKEYS.

HSCAN NOVALUES ──Redis 7.4, Valkey 8──> names      older servers ──HKEYS, or HSCAN if there are many──> names
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.store.keys import decode_fields
from bagpipe.store.redis.passing import is_passing_error

__all__ = ["bucket_fields", "scanned"]

#: Fields per HSCAN step: a few milliseconds of server time.
_SCAN_FIELDS = 10_000
#: Fields of a bucket that a server without NOVALUES is asked for at once, and bytes of rows per step of a larger one.
_HKEYS_FIELDS = 200_000
_SCAN_BYTES = 4 << 20
#: Bytes of a reply's field and value beside the row, rounded up.
_PAIR_BYTES = 64
#: Times that a scan can return a field of a hash that grows or shrinks.
_MAX_RETURNS = 4


def bucket_fields(client: redis.Redis, *, key: bytes, row_bytes: int, timeout_s: float) -> list[NDArray[np.void]]:
    """Fields of a hash as `FIELD_DTYPE`, in parts.

    Raises:
        StoreError: another program wrote into the bucket.
        redis.InvalidResponse: more fields than the hash has, or none for `timeout_s` and no end.
    """
    num_fields = int(client.hlen(key))
    try:
        return list(scanned(client, key, num_fields, timeout_s, count=_SCAN_FIELDS, no_values=True))
    except redis.ResponseError as error:
        if isinstance(error, redis.exceptions.AskError) or is_passing_error(error):
            raise  # it does not concern the command
    # HSCAN NOVALUES needs Redis 7.4 or Valkey 8.
    if num_fields <= _HKEYS_FIELDS:
        return [decode_fields(client.hkeys(key))]
    count = max(1, min(_SCAN_FIELDS, _SCAN_BYTES // (row_bytes + _PAIR_BYTES)))
    return list(scanned(client, key, num_fields, timeout_s, count=count, no_values=False))


def scanned(
    client: redis.Redis, key: bytes, num_fields: int, timeout_s: float, *, count: int, no_values: bool
) -> Iterator[NDArray[np.void]]:
    """Fields of a hash as `FIELD_DTYPE`, step by step.

    Args:
        client: of its server.
        key: of the hash.
        num_fields: that it has.
        timeout_s: longest time without a field.
        count: fields of a step, about.
        no_values: receive fields without values.

    Raises:
        StoreError: another program wrote into the bucket.
        redis.InvalidResponse: more fields than the hash has, or none for `timeout_s` and no end.
    """
    cursor, left = 0, _MAX_RETURNS * (num_fields + _SCAN_FIELDS)
    deadline_s = time.monotonic() + timeout_s
    while True:
        cursor, fields = client.hscan(key, cursor, count=count, no_values=no_values or None)
        yield decode_fields(list(fields))
        if cursor == 0:
            return
        left -= len(fields)
        if fields:
            deadline_s = time.monotonic() + timeout_s
        if left < 0 or time.monotonic() > deadline_s:
            raise redis.InvalidResponse(f"a scan of {key.decode()} that does not end")
