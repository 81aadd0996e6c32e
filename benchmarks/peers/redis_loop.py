"""Contenders whose rows live in the store, over redis-py: one key per row, MGET and MSET.

    unique rows of the batch ──RowSource.take──> records ──forward, backward, Adagrad──> RowSource.give
        Uncached: MGET all, MSET all               LeastRecent: a slab of records; misses by MGET, dirty victims by MSET

In their favour, rows are numbered and keys encoded in advance, hiredis parses the replies, and numpy maintains the LRU
batch by batch (it evicts what a row-by-row list would, except for ties within a batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import redis
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from benchmarks.peers.sample import Minibatch
from benchmarks.peers.shared_model import Peer, Untyped

__all__ = ["LeastRecent", "RemoteLoop", "RowKeys", "RowSource", "Uncached"]

Rows = NDArray[np.int64]

_FILL_ROWS = 10_000


class RowKeys:
    """Row records in a server, one string per row.

    Args:
        url: of the server.
        peer: tables and initial rows.
    """

    def __init__(self, url: str, peer: Peer) -> None:
        self._client: Untyped = redis.Redis.from_url(url)
        self._keys = [b"%d" % number for number in range(peer.sample.num_rows)]
        self.width = 2 * peer.row_tables[0].dim  # weights, and Adagrad's sum of squares

    def fill(self, peer: Peer) -> None:
        """Write every row's initial value, so that every first use of a row is a read."""
        tables = [peer.initial_rows(number) for number in range(len(peer.row_tables))]
        weights = torch.cat(tables)
        records = torch.cat([weights, torch.zeros_like(weights)], dim=1).numpy()
        for first in range(0, len(records), _FILL_ROWS):
            block = np.arange(first, min(first + _FILL_ROWS, len(records)))
            self.write(block, records[block])

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """Records ``[n, width]``."""
        keys = self._keys
        found = self._client.mget([keys[row] for row in rows.tolist()]) if len(rows) else []
        return np.frombuffer(bytearray().join(found), dtype=np.float32).reshape(-1, self.width)

    def write(self, rows: Rows, records: NDArray[np.float32]) -> None:
        if len(rows):
            keys, size = self._keys, self.width * 4
            data = records.tobytes()
            starts = range(0, len(data), size)
            self._client.mset({keys[row]: data[at : at + size] for row, at in zip(rows.tolist(), starts, strict=True)})


class RowSource(Protocol):
    """Source and sink of a batch's records."""

    def take(self, rows: Rows) -> Tensor:
        """Records ``[n, width]`` of distinct rows, which the caller can modify."""
        ...

    def give(self, rows: Rows, records: Tensor) -> None:
        """Take the modified records of the same rows."""
        ...


class Uncached:
    """No cache: every batch's rows are read and written."""

    def __init__(self, keys: RowKeys) -> None:
        self._keys = keys

    def take(self, rows: Rows) -> Tensor:
        return torch.from_numpy(self._keys.read(rows))

    def give(self, rows: Rows, records: Tensor) -> None:
        self._keys.write(rows, records.numpy())


class LeastRecent:
    """A read-through LRU cache that writes rows back when it evicts them.

    Args:
        keys: the store.
        num_rows: rows of all tables.
        num_slots: rows the cache holds.
    """

    def __init__(self, keys: RowKeys, *, num_rows: int, num_slots: int) -> None:
        self._keys = keys
        self._slab = torch.empty(num_slots, keys.width)
        self._slot_of = np.full(num_rows, -1, dtype=np.int64)
        self._row_in = np.full(num_slots, -1, dtype=np.int64)
        self._used_at = np.full(num_slots, -1, dtype=np.int64)
        self._clock = 0
        self.misses = 0

    def take(self, rows: Rows) -> Tensor:
        """As `RowSource.take`.

        Raises:
            InputError: more rows than slots.
        """
        if len(rows) > len(self._row_in):
            raise InputError(
                f"expected a batch of at most {len(self._row_in)} rows, the size of the cache, got {len(rows)}"
            )
        self._clock += 1
        slots = self._slot_of[rows]
        self._used_at[slots[slots >= 0]] = self._clock
        missing = rows[slots < 0]
        if len(missing):
            self._enter(missing)
            slots = self._slot_of[rows]
        self.misses += len(missing)
        return self._slab.index_select(0, torch.from_numpy(slots))

    def _enter(self, rows: Rows) -> None:
        victims = np.argpartition(self._used_at, len(rows) - 1)[: len(rows)]
        old = self._row_in[victims]
        leaving = victims[old >= 0]
        self._keys.write(self._row_in[leaving], self._slab.index_select(0, torch.from_numpy(leaving)).numpy())
        self._slot_of[self._row_in[leaving]] = -1
        self._slab.index_copy_(0, torch.from_numpy(victims), torch.from_numpy(self._keys.read(rows)))
        self._slot_of[rows] = victims
        self._row_in[victims] = rows
        self._used_at[victims] = self._clock

    def give(self, rows: Rows, records: Tensor) -> None:
        self._slab.index_copy_(0, torch.from_numpy(self._slot_of[rows]), records)


class RemoteLoop:
    """A `Contender`: fetch, train, write back, next batch."""

    def __init__(self, peer: Peer, source: RowSource) -> None:
        self._source = source
        self._optim = peer.config.optim
        self._tables = _PackedTables(peer)
        self._model = peer.put(self._tables)
        self._optimizer = peer.dense_optimizer(list(self._model.parameters()))

    def steps(self, batches: Sequence[Minibatch]) -> Iterator[Tensor]:
        for number, batch in enumerate(batches, start=1):
            rows, records = self._begin(batch)
            weights = self._tables.weights.requires_grad_()
            logits = self._model(batch.dense, None).reshape(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            assert weights.grad is not None, "backward reached the rows"
            with torch.no_grad():
                step = RowStep(lr=self._optim.rows_lr, eps=self._optim.eps, step=number)
                ROW_OPTIMIZERS["adagrad"].apply(records, weights.grad, step)
            self._source.give(rows, records)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            yield loss.detach()

    def _begin(self, batch: Minibatch) -> tuple[Rows, Tensor]:
        rows, inverse = np.unique(batch.table_rows.numpy(), return_inverse=True)
        records = self._source.take(rows)
        self._tables.weights = records[:, : records.shape[1] // 2].clone()
        self._tables.inverse = torch.from_numpy(inverse)
        self._tables.offsets = batch.offsets
        return rows, records

    def score(self, batch: Minibatch) -> Tensor:
        self._model.eval()
        self._begin(batch)
        with torch.no_grad():
            logits: Tensor = self._model(batch.dense, None).reshape(-1)
        return logits


class _PackedTables(nn.Module):
    """The batch's rows of all tables in one matrix, with one lookup for all."""

    weights: Tensor
    inverse: Tensor
    offsets: Tensor

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._names = peer.sample.feature_names
        self._dims = [table.dim for table in peer.row_tables]

    def forward(self, _: object) -> Untyped:
        bags = nn.functional.embedding_bag(
            self.inverse, self.weights, self.offsets, mode="sum", include_last_offset=True
        )
        by_example = bags.view(len(self._dims), -1, bags.shape[1]).transpose(0, 1).reshape(-1, sum(self._dims))
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=by_example)
