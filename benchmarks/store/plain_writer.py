"""HSETs of rows only: the store's writes without fence and row checksums, by the same client.

requests ──route──> groups ──PlainCodec──> HSET per bucket ──> the server
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.resp_rows import RowEncoder
from bagpipe.store.redis.row_codecs import WriteCodec, WriteGroup
from bagpipe.store.redis.shard_client import ServerListClient
from bagpipe.store.redis.urls import parse_urls

__all__ = ["PlainWriter"]


class PlainEncoder(RowEncoder):
    """Field-value pairs of an HSET without row checksums."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        head, middle, tail = b"$12\r\n", b"\r\n$%d\r\n" % row_bytes, b"\r\n"
        self._constants = {"head": head, "middle": middle, "tail": tail}
        kinds = {"head": "S5", "table": ">u4", "id": ">i8", "middle": f"S{len(middle)}", "row": f"V{row_bytes}"}
        self._dtype = np.dtype([*kinds.items(), ("tail", "S2")])
        self._scratch = np.empty(0, self._dtype)

    def encode(
        self, tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: NDArray[np.void], checks: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """See `RowEncoder.encode`; leaves `checks` as they are."""
        if len(ids) > len(self._scratch):
            self._scratch = np.empty(len(ids), self._dtype)
            for name, constant in self._constants.items():
                self._scratch[name] = constant
        records = self._scratch[: len(ids)]
        records["table"], records["id"], records["row"] = tables, ids, rows
        return records.view(np.uint8)


class PlainCodec(WriteCodec):
    """Encodes HSETs without row checksums."""

    def _encoder(self, group: WriteGroup) -> RowEncoder:
        row_bytes = group.rows.itemsize
        if row_bytes not in self._encoders:
            self._encoders[row_bytes] = PlainEncoder(row_bytes)
        return self._encoders[row_bytes]


class PlainWriter:
    """Writes the same batch repeatedly. Context manager.

    Args:
        url: of one server.
        requests: the batch; all rows have the same width.
        num_buckets: buckets of the namespace.
    """

    def __init__(self, url: str, requests: Sequence[WriteRequest], num_buckets: int) -> None:
        keys = [bucket_key("bench-plain", bucket) for bucket in range(num_buckets)]
        self._requests = requests
        self._client = ServerListClient(
            parse_urls(url), num_buckets=num_buckets, timeout_s=30.0, make_codec=lambda: PlainCodec(keys)
        )

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._client.__exit__(None, None, None)

    def write(self) -> None:
        """Write all rows of the batch."""
        parts = [request.rows for request in self._requests]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        routed = self._client.route([(request.table, request.ids) for request in self._requests])
        voids = rows.view(f"V{rows.shape[1] * rows.itemsize}").reshape(-1)
        group = WriteGroup(routed=routed, rows=voids, checks=np.empty(len(voids), np.uint64))
        self._client.execute([group], repeat=False)
