"""`FileRows`: the rows of an export folder, mapped from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.serving.manifest import MODEL_FILE, ExportManifest, TableFiles, read_manifest
from bagpipe.serving.row_words import CodedRows, widen
from bagpipe.serving.tensor_file import TensorFile, checksum_of
from bagpipe.types.schema import RowSchema

__all__ = ["FileRows"]


class FileRows:
    """Rows of an export. Usable by several threads, also after the folder's removal.

    Args:
        folder: of the export.
        verify: compare the checksum of every table, which reads the whole file.

    Raises:
        InputError: it is no whole export, or its rows are in a store.
    """

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        self.manifest: ExportManifest = read_manifest(folder)
        self.schema: RowSchema = self.manifest.rows
        self.decay = self.manifest.decay
        if self.manifest.rows_in != "files":
            raise InputError(f"{folder}: its rows are in the job's store: name it, by store_url and namespace")
        self._file = TensorFile(folder / MODEL_FILE)
        self._tables = [self.manifest.table_of(table.name) for table in self.schema.tables]
        checksums = self.manifest.files[MODEL_FILE].tensors
        if checksums.keys() != self._file.specs.keys():
            raise InputError(f"{folder / MODEL_FILE}: has other tensors than the manifest says")
        if verify:
            for name, checksum in checksums.items():
                if checksum_of(self._file.words(name)) != checksum:
                    raise InputError(f"{folder / MODEL_FILE}: tensor {name!r} does not match its checksum")

    def read(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """For each table number and ids: weights ``[n, dim]`` in the compute dtype, and which are found."""
        return [self._read(self._tables[table], ids) for table, ids in requests]

    def ping(self) -> None:
        """Nothing to ask: the file is mapped."""

    def close(self) -> None:
        """Nothing to close: the mapping ends with its last array."""

    def _read(self, table: TableFiles, ids: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        words = self._file.words(table.weight)
        if table.ids is None:
            positions, found = ids, np.ones(len(ids), np.bool_)
        elif not len(words):
            positions, found = ids[:0], np.zeros(len(ids), np.bool_)
        else:
            known = self._file.words(table.ids)
            # In ascending order a search touches each page of the file once.
            order = np.argsort(ids)
            places = np.empty(len(ids), np.int64)
            places[order] = np.minimum(np.searchsorted(known, ids[order]), len(known) - 1)
            found = known[places] == ids
            positions = places[found]
        if table.dtype == "int8":
            scale, offset = (self._file.words(f"{table.weight}.{part}") for part in ("scale", "offset"))
            coded = CodedRows(codes=words[positions], scale=scale[positions], offset=offset[positions])
            values: NDArray[Any] = coded.decoded()
        else:
            values = widen(words[positions], table.dtype)
        values = values.astype(self.schema.row_type.compute, copy=False)
        if found.all():
            return values, found
        out = np.zeros((len(ids), words.shape[1]), values.dtype)
        out[found] = values
        return out, found
