"""Sources of a job's initial rows: tensors, safetensors files, another namespace of a store.

    TensorRows, FileRows ──chunks──> weights, optimizer state ──records──┐
    NamespaceRows ──StoredRows──> whole records ─────────────────────────┴──> WriteRequest, chunk by chunk

Everything that can be checked is checked when a source is made; rows are read when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.checkpoint.export import row_states
from bagpipe.checkpoint.stored_rows import StoredRows
from bagpipe.config.sections import StoreConfig
from bagpipe.embedding.integer_ids import given_ids
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.row_format import host_words, split_record
from bagpipe.start_from.safetensor_files import SafetensorFiles
from bagpipe.start_from.source import CHUNK_BYTES
from bagpipe.start_from.tensor_source import ids_of, weights_by_table
from bagpipe.store.fencing.presence import check_present
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.store.open import open_store
from bagpipe.train_pipeline.options import Options
from bagpipe.types.schema import RowSchema, base_optimizer

__all__ = ["NamespaceRows", "RowChunks", "TensorRows", "namespace_rows", "rows_of_file"]

#: Rows `first` to `end` of a tensor, in memory or in a file.
_Read: TypeAlias = Callable[[int, int], Tensor]


class RowChunks(Protocol):
    """Rows to write before the first batch."""

    def requests(self) -> Iterator[WriteRequest]:
        """The rows, in chunks of a few MiB; ids are distinct within a chunk."""
        ...


class TensorRows:
    """Rows of one table.

    Args:
        schema: of the job's rows.
        table: name of the table.
        ids: ``[n]`` integers of any type, distinct; None: 0 to n - 1.
        weights: ``[n, dim]``; converted to the dtype of the rows.
        state: optimizer state by torch's names: ``sum`` or ``exp_avg`` and ``exp_avg_sq``, ``[n, dim]``, or ``[n]`` of
            row-wise Adagrad; None: zero.

    Raises:
        InputError: there is no such table, or shapes, ids or names do not fit it.
    """

    def __init__(
        self,
        schema: RowSchema,
        table: str,
        ids: Tensor | NDArray[np.integer[Any]] | Sequence[int] | None,
        weights: Tensor,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        shapes = {name: tuple(value.shape) for name, value in (state or {}).items()}
        known = None if ids is None else _ids(table, ids)
        self._rows = _Rows(schema, table, known, tuple(weights.shape), None if state is None else shapes)
        self._weights = weights.detach()
        self._state = {name: value.detach() for name, value in (state or {}).items()}

    def requests(self) -> Iterator[WriteRequest]:
        return self._rows.requests(_read(self._weights), {name: _read(value) for name, value in self._state.items()})


class _FileRows:
    """Rows of one table in a safetensors file, and their state in another.

    Args:
        rows: the place of the rows.
        files: has the weights.
        name: of the weights.
        state_files: has the state; None: there is none.
    """

    def __init__(self, rows: _Rows, files: SafetensorFiles, name: str, state_files: SafetensorFiles | None) -> None:
        self._rows = rows
        self._files = files
        self._name = name
        self._state_files = state_files

    def requests(self) -> Iterator[WriteRequest]:
        with ExitStack() as stack:
            weights = stack.enter_context(self._files.rows(self._name)).read
            state = {}
            if self._state_files is not None:
                for name in self._rows.states:
                    state[name] = stack.enter_context(self._state_files.rows(f"{self._name}.{name}")).read
            yield from self._rows.requests(weights, state)


class NamespaceRows:
    """All rows of another namespace, with their optimizer state.

    Args:
        open_other: opens its store, with the schema of the job's rows.
        label: its name in errors.
    """

    def __init__(self, open_other: Callable[[], Store], label: str) -> None:
        self._open_other = open_other
        self._label = label

    def requests(self) -> Iterator[WriteRequest]:
        """See `RowChunks`.

        Raises:
            InputError: the namespace has no rows, or rows of other tables, optimizers or types.
            StoreError: it has lost rows, or the store failed.
        """
        with self._open_other() as store:
            if not store.check():
                raise InputError(f"{self._label} has no rows to load")
            with store.ledger() as ledger:
                check_present(ledger.state(), ledger.job(), namespace=self._label)
            rows = StoredRows(store)
            for table in range(len(store.schema.tables)):
                yield from rows.rows(table)


def namespace_rows(schema: RowSchema, options: Options, namespace: str, store: str | None = None) -> NamespaceRows:
    """The rows of another namespace.

    Args:
        schema: of the job's rows.
        options: of the pipeline; its store, unless `store` names one.
        namespace: its name.
        store: URL of its store.

    Raises:
        InputError: no store is named, it is the pipeline's own namespace, or rows decay.
    """
    url = store or options.store
    if not url:
        raise InputError(f"namespace {namespace!r} cannot be in the private store of a new pipeline: give store=URL")
    decaying = [table.name for n, table in enumerate(schema.tables) if base_optimizer(schema.optimizer_of(n))[1]]
    if decaying:
        raise InputError(
            f"rows of table {decaying[0]!r} decay, and those of namespace {namespace!r} are at steps of another job: "
            "expected an export of that job, for load_rows_from"
        )
    if (url, namespace) == (options.store, options.namespace):
        raise InputError(f'namespace {namespace!r} is that of the pipeline: existing="rows-only" trains its rows on')
    config = StoreConfig()
    return NamespaceRows(
        lambda: open_store(
            url,
            namespace=namespace,
            schema=schema,
            buckets=config.buckets,
            timeout_s=options.timeout_s,
            durability="memory",
        ),
        f"namespace {namespace!r}",
    )


def rows_of_file(
    schema: RowSchema, path: Path, tables: Collection[str] | None = None, state: Path | None = None
) -> dict[str, RowChunks]:
    """The tables of a safetensors file, by name: weights ``….embedding_bags.<table>.weight`` ``[n, dim]``.

    ``….embedding_bags.<table>.ids`` int64 ``[n]`` beside a weight names its rows; they are 0 to n - 1 otherwise.

    Args:
        schema: of the job's rows.
        path: of the file.
        tables: names of the tables to take; None: all that the schema has.
        state: file of the optimizer state, ``….<table>.weight.<state>``; None: zero.

    Raises:
        InputError: a file cannot be read, lacks a table, or a tensor does not fit its table.
    """
    files, states = SafetensorFiles([path]), None if state is None else SafetensorFiles([state])
    names = weights_by_table(files.outline)
    wanted = [table.name for table in schema.tables if table.name in names] if tables is None else list(tables)
    lacking = [name for name in wanted if name not in names]
    if lacking or not wanted:
        raise InputError(
            f"{path}: expected weights of table {(lacking or [schema.tables[0].name])[0]!r}, named "
            f"….embedding_bags.<table>.weight, it has tables {sorted(names)}"
        )
    found: dict[str, RowChunks] = {}
    for table in wanted:
        name = names[table]
        ids = _ids(table, files.tensor(ids_of(name))) if ids_of(name) in files.outline else None
        shapes = None if states is None else _shapes_below(states.outline, f"{name}.")
        rows = _Rows(schema, table, ids, tuple(files.outline[name].shape), shapes)
        found[table] = _FileRows(rows, files, name, states)
    return found


class _Rows:
    """The place of some rows in the schema, checked.

    Attributes:
        states: names of their optimizer states that are given.
    """

    def __init__(
        self,
        schema: RowSchema,
        table: str,
        ids: NDArray[np.int64] | None,
        shape: tuple[int, ...],
        states: Mapping[str, tuple[int, ...]] | None,
    ) -> None:
        names = [each.name for each in schema.tables]
        if table not in names:
            raise InputError(f"expected one of the tables {names}, got {table!r}")
        self._schema = schema
        self._table = names.index(table)
        self._ids = ids
        self._optimizer = schema.optimizer_of(self._table)
        place = schema.tables[self._table]
        self._dim = place.dim
        self._num_rows = shape[0] if ids is None and shape else len(ids if ids is not None else ())
        if shape != (self._num_rows, place.dim):
            raise InputError(f"table {table!r}: expected weights [{self._num_rows}, {place.dim}], got {list(shape)}")
        if place.rows is not None:
            low, high = (0, self._num_rows - 1) if ids is None or not len(ids) else (int(ids.min()), int(ids.max()))
            if low < 0 or high >= place.rows:
                raise InputError(f"table {table!r}: expected ids in [0, {place.rows}), got {low} to {high}")
        expected = {name: (self._num_rows,) if scalar else shape for name, scalar in row_states(self._optimizer)}
        if states is not None and dict(states) != expected:
            raise InputError(
                f"table {table!r}: expected the state of {base_optimizer(self._optimizer)[0]}, {_named(expected)}, "
                f"got {_named(states)}"
            )
        self.states = tuple(expected) if states is not None else ()

    def requests(self, weights: _Read, states: Mapping[str, _Read]) -> Iterator[WriteRequest]:
        schema, table = self._schema, self._table
        chunk = max(1, CHUNK_BYTES // schema.row_bytes(table))
        for first in range(0, self._num_rows, chunk):
            end = min(first + chunk, self._num_rows)
            count = end - first
            records = torch.zeros(count, schema.row_width(table), dtype=TORCH_DTYPE[schema.dtype_of(table)])
            own, state = split_record(records, schema, self._dim, self._optimizer)
            own.copy_(weights(first, end))
            if self.states:
                given = torch.cat([states[name](first, end).reshape(count, -1).cpu() for name in self.states], 1)
                state[:, : given.shape[1]].copy_(given)  # rows that decay begin at step 0
            ids = np.arange(first, end) if self._ids is None else self._ids[first:end]
            yield WriteRequest(table, ids, host_words(records))


def _ids(table: str, ids: Tensor | NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.int64]:
    """Ids, checked to be distinct integers."""
    found: NDArray[np.int64] = given_ids(ids, f"ids of table {table!r}").contiguous().numpy()
    values, counts = np.unique(found, return_counts=True)
    if len(values) < len(found):
        raise InputError(f"table {table!r}: ids must be distinct, got {values[counts > 1][0]} more than once")
    return found


def _read(tensor: Tensor) -> _Read:
    return lambda first, end: tensor[first:end]


def _shapes_below(outline: Mapping[str, Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in outline.items() if name.startswith(prefix)
    }


def _named(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"
