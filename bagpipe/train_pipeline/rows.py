"""`TableRows`: the rows of one table, read in Python.

rows[ids] ──flush──> store ──read──> weights      ids that the store does not have: initial values
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.embedding.integer_ids import given_ids
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE, InitialWeights
from bagpipe.train_pipeline.error_texts import speaks_arguments
from bagpipe.train_pipeline.session import Session

__all__ = ["TableRows"]

#: Rows read at a time.
_CHUNK_ROWS = 1 << 14


@speaks_arguments
class TableRows:
    """Rows of one table, as of the last trained batch. Reads go to the store.

    Args:
        session: open; the store of its job and the decay of its rows are read.
        table: number of the table.
        pipeline: of the session. It is kept, as it is closed when nobody refers to it.
    """

    def __init__(self, session: Session, table: int, pipeline: object) -> None:
        self._pipeline = pipeline
        job = session.opened().job
        self._session = session
        self._store = store = job.store
        self._history = job.engine.cache.history
        self._number = table
        self._table = store.schema.tables[table]

    @property
    def dim(self) -> int:
        """Weights per row."""
        return self._table.dim

    def ids(self) -> Tensor:
        """int64 ``[num_rows]``, ascending: ids of the rows that the store has. Takes 8 B a row."""
        with self._session.resting("rows"):
            return torch.from_numpy(self._store.ids(self._number))

    def __len__(self) -> int:
        return len(self.ids())

    def __getitem__(self, ids: Tensor | NDArray[np.integer] | Sequence[int] | int | slice) -> Tensor:
        """``[n, dim]``: weights of rows, on the host, in the dtype of the rows. A row never trained: its initial value.

        Args:
            ids: ``[n]`` integers of any type; they may repeat. A slice of a bounded table. A single id: ``[dim]``.

        Raises:
            InputError: an id outside the table, or no integer.
        """
        if isinstance(ids, (int, np.integer)):
            return self[[int(ids)]][0]
        if isinstance(ids, slice):
            if self._table.rows is None:
                raise InputError(f"table {self._table.name!r} is unbounded: expected ids, got a slice")
            ids = list(range(*ids.indices(self._table.rows)))
        wanted = given_ids(ids, f"ids of table {self._table.name!r}")
        with self._session.resting("rows"):
            return self._weights(wanted)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids int64 ``[n]`` and weights ``[n, dim]`` of the rows that the store has, ascending by id, in chunks."""
        for ids in torch.split(self.ids(), _CHUNK_ROWS):
            if len(ids):
                with self._session.call():
                    weights = self._weights(ids)
                yield ids, weights

    def _weights(self, ids: Tensor) -> Tensor:
        rows = self._table.rows
        if rows is not None and len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            raise InputError(
                f"table {self._table.name!r}: expected ids in [0, {rows}), got {int(ids.min())} to {int(ids.max())}"
            )
        unique, inverse = torch.unique(ids, return_inverse=True)
        out = torch.empty(len(unique), self.dim, dtype=TORCH_DTYPE[self._store.schema.dtype_of(self._number)])
        initial = InitialWeights(self._store.schema, torch.device("cpu"))
        for start in range(0, len(unique), _CHUNK_ROWS):
            part = unique[start : start + _CHUNK_ROWS]
            found = self._store.read(self._number, part.numpy())
            records = torch.from_numpy(found.rows).view(out.dtype)
            new = torch.from_numpy(~found.found)
            if bool(new.any()):
                fresh = torch.empty(int(new.sum()), self.dim, dtype=out.dtype)
                initial.fill_(fresh, torch.full((len(fresh),), self._number), part[new])
                records[new, : self.dim] = fresh  # their state is zero
            self._history.catch_up(self._number, records)
            out[start : start + len(part)] = records[:, : self.dim]
        return out[inverse]
