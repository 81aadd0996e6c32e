"""`TensorSource`: a model's tensors by the names of its state dict, as what a new job takes from. No optimizer state.

    <anything>.embedding_bags.<table>.weight   [n, dim]   the rows of a table, with ids 0 to n - 1
    <anything>.embeddings.<table>.weight                  the same of a collection of sequences
    <the same>.ids                             int64 [n]  their ids, where they are others
    optimizer.… optim.…                                   left out
    any other name                                        the dense parameter or buffer of this name

Wrappers are taken off a name: ``model.``, ``module.`` and ``state_dict.`` at its beginning, and the modules of DMP,
FSDP and torch.compile anywhere in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bagpipe.checkpoint.dense_state import DenseState
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.start_from.source import CHUNK_BYTES, Counts, Extent, RowChunk, SourceTable

__all__ = ["TensorFiles", "TensorRows", "TensorSource", "ids_of", "table_of", "weights_by_table"]

#: Where torchrec's collections keep their tables.
_FOLDERS = ("embedding_bags", "embeddings")
#: Names that wrappers put before those of a model, and in them.
_LEADING = ("model", "module", "state_dict")
_ANYWHERE = ("_dmp_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
#: Beginnings of names that are no weights.
_OTHERS = ("optimizer.", "optim.")
_ROW_DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class TensorRows(AbstractContextManager["TensorRows"], Protocol):
    """Rows of one tensor, read in ascending order."""

    def read(self, first: int, end: int) -> Tensor:
        """Rows `first` to `end`, ``[end - first, …]`` on the host."""
        ...


class TensorFiles(Protocol):
    """Named tensors in files.

    Attributes:
        outline: by name, on the meta device: shapes and dtypes.
    """

    outline: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the host."""
        ...

    def rows(self, name: str) -> TensorRows:
        """The rows of a tensor."""
        ...


class TensorSource:
    """See `bagpipe.start_from.source.Source`.

    Args:
        files: the tensors.
        label: their name for people.
    """

    def __init__(self, files: TensorFiles, label: str) -> None:
        self.label = label
        self.settings: Mapping[str, Any] = {}
        self.seed: int | None = None
        self.counts = Counts()
        self.world_size = 0
        self.checkpoint_id = ""
        self._files = files
        weights = [name for name in files.outline if not name.startswith(_OTHERS)]
        tables = {name: table for name in weights if _has_rows(files.outline[name]) and (table := table_of(name))}
        found = {name: _TensorTable(files, name) for name in tables}
        self.tables: Mapping[str, SourceTable] = {
            table: found[name] for table, name in weights_by_table(tables).items()
        }
        taken = {*tables, *map(ids_of, tables)}
        self._dense: dict[str, str] = {}
        for name in weights:
            if name not in taken:
                self._dense.setdefault(name, name)
        for name in [name for name in weights if name not in taken]:
            self._dense.setdefault(_unwrapped(name), name)

    def outline(self, names: frozenset[str]) -> DenseState:
        """The dense part without values: tensors on the meta device.

        Args:
            names: those that the new job has; of the others each has one name.
        """
        shown: dict[str, Tensor] = {}
        seen = {own for name, own in self._dense.items() if name in names}
        for name, own in self._dense.items():
            if name in names or (own not in seen and name == _unwrapped(own)):
                shown[f"model.{name}"] = self._files.outline[own]
        return DenseState(tensors=shown)

    def dense(self, rank: int, names: frozenset[str]) -> DenseState:
        """See `Source`."""
        return DenseState(
            tensors={f"model.{name}": self._files.tensor(own) for name, own in self._dense.items() if name in names}
        )


class _TensorTable:
    """See `SourceTable`."""

    optimizer = ""
    hashed_rows: int | None = None

    def __init__(self, files: TensorFiles, name: str) -> None:
        outline = files.outline[name]
        self.dim = int(outline.shape[1])
        self.dtype = _ROW_DTYPES[outline.dtype]
        self._files = files
        self._name = name
        self._num_rows = int(outline.shape[0])
        self._has_ids = ids_of(name) in files.outline

    def extent(self) -> Extent:
        if not self._has_ids or not self._num_rows:
            return Extent(num_rows=self._num_rows, least=0, largest=self._num_rows - 1)
        ids = self._ids()
        return Extent(num_rows=len(ids), least=int(ids[0]), largest=int(ids[-1]))

    def chunks(self) -> Iterator[RowChunk]:
        ids = self._ids() if self._has_ids else None
        count = max(1, CHUNK_BYTES // (self.dim * TORCH_DTYPE[self.dtype].itemsize))
        with self._files.rows(self._name) as rows:
            for first in range(0, self._num_rows, count):
                end = min(first + count, self._num_rows)
                part = np.arange(first, end) if ids is None else ids[first:end].numpy()
                yield RowChunk(ids=part, weights=rows.read(first, end))

    def _ids(self) -> Tensor:
        name = ids_of(self._name)
        ids = self._files.tensor(name)
        if ids.dtype != torch.int64 or tuple(ids.shape) != (self._num_rows,):
            raise InputError(f"{name}: expected int64 [{self._num_rows}], got {ids.dtype} {list(ids.shape)}")
        if bool((ids[1:] <= ids[:-1]).any()):
            raise InputError(f"{name}: expected ascending, distinct ids")
        return ids


def table_of(name: str) -> str:
    """The table whose weights have a name; empty: it is no name of a table's weights."""
    parts = name.split(".")
    return parts[-2] if len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _FOLDERS else ""


def weights_by_table(names: Iterable[str]) -> dict[str, str]:
    """Names of weights by the tables of a model, among any names.

    Where several collections have a table of one name, each of these is there after the path of its collection too
    (`bagpipe.embedding.table_configs.table_names_of`), and the first under the name alone.
    """
    found: dict[str, str] = {}
    for name in names:
        if not (table := table_of(name)):
            continue
        first = found.setdefault(table, name)
        if first != name:
            for each in (first, name):
                found.setdefault(_qualified(each), each)
    return found


def _qualified(name: str) -> str:
    parts = _unwrapped(name).split(".")
    return ".".join((*parts[:-3], parts[-2]))


def ids_of(weight: str) -> str:
    """The name of the ids beside a table's weights."""
    return f"{weight.removesuffix('.weight')}.ids"


def _has_rows(outline: Tensor) -> bool:
    return outline.dim() == 2 and outline.dtype in _ROW_DTYPES


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] in _LEADING:
        parts.pop(0)
    return ".".join(parts)
