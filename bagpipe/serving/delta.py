"""A delta: the rows of an export that differ from an earlier one, the ids that it lacks, and its whole dense part.

    rows of B, table by table ──compare with the base's words──> ids and words of the rows that differ ─┐
    dense tensors, dense.pt2 of B ──whole───────────────────────────────────────────────────────────────┤
    checksums of the base's tensors, manifest of the full export of B ──delta.json──────────────────────┴──> folder

    delta.safetensors     rows:<table>                int64 [k], the ids that changed, ascending
                          deleted:<table>             int64 [k], ids of the base's rows that are gone, ascending
                          <file>:<tensor of a table>  [k, …]
                          <file>:<dense tensor>       whole

Rows are compared by their words, so a row that was trained and ended with its old bits is not in the delta. A deleted
row of a bounded table has its initial value again, which differs. Only tables whose rows are gone have deleted ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.export import ExportTable
from bagpipe.errors import InputError
from bagpipe.serving.export_folder import ExportSource, file_writers, with_program
from bagpipe.serving.manifest import MODEL_FILE, ExportFile, ExportManifest, read_manifest
from bagpipe.serving.table_tensors import TableTensors, Words, specs_of
from bagpipe.serving.tensor_file import TensorFile, TensorFileWriter, checksum_of
from bagpipe.util.documents import parse_json

__all__ = [
    "DELTA",
    "DELTA_FILE",
    "Base",
    "Delta",
    "FolderBase",
    "SourceBase",
    "deleted_key",
    "key_of",
    "read_delta",
    "rows_key",
    "write_delta",
]

DELTA, DELTA_FILE = "delta.json", "delta.safetensors"
#: Newer versions are rejected. Version 2 added deleted rows; a delta without any is written as version 1.
FORMAT_VERSION = 2
_KIND = "bagpipe export delta"
#: Rows compared at a time.
_CHUNK_ROWS = 1 << 16


class Base(Protocol):
    """The earlier export."""

    @property
    def manifest(self) -> ExportManifest: ...

    def tensors(self, table: ExportTable, layout: TableTensors) -> TableTensors:
        """The tensors of a table, those of the names in `layout`."""
        ...

    def checksum(self, file: str, name: str, words: Words) -> str:
        """SHA-256 of a tensor of a table."""
        ...


class FolderBase:
    """An export folder as the base.

    Raises:
        InputError: it is no whole export, or its rows are in a store.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        if self.manifest.rows_in != "files":
            raise InputError(f"{folder}: its rows are in a store: a delta needs an export with rows")
        self._folder = folder
        self._files = {name: TensorFile(folder / name) for name, file in self.manifest.files.items() if file.tensors}

    def tensors(self, table: ExportTable, layout: TableTensors) -> TableTensors:
        """See `Base`; mapped."""
        by_file = {
            file: {
                name: Words(dtype=opened.specs[name].dtype, values=opened.words(name))
                for name in layout.by_file.get(file, ())
                if name in opened.specs
            }
            for file, opened in self._files.items()
        }
        return TableTensors(place=self.manifest.table_of(table.table), by_file=by_file)

    def checksum(self, file: str, name: str, words: Words) -> str:
        """See `Base`; of the manifest."""
        return self.manifest.files[file].tensors[name]


class SourceBase:
    """The export that an earlier checkpoint would give, as the base."""

    def __init__(self, source: ExportSource) -> None:
        self.manifest = source.manifest
        self._source = source

    def tensors(self, table: ExportTable, layout: TableTensors) -> TableTensors:
        """See `Base`."""
        return self._source.tensors(table)

    def checksum(self, file: str, name: str, words: Words) -> str:
        """See `Base`."""
        return checksum_of(words.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A delta.

    Attributes:
        base_step: step of the base.
        base_tensors: SHA-256 of the tensors of the base, by name, by file, by table.
        manifest: that of the full export, which `apply` makes.
        num_rows: rows in the delta, by table.
        num_deleted: rows of the base that are gone, by table; only tables with any.
        file: `DELTA_FILE`.
    """

    base_step: int
    base_tensors: Mapping[str, Mapping[str, Mapping[str, str]]]
    manifest: ExportManifest
    num_rows: Mapping[str, int] = field(default_factory=dict)
    num_deleted: Mapping[str, int] = field(default_factory=dict)
    file: ExportFile

    def encode(self) -> bytes:
        """Content of ``delta.json``."""
        deleted = {"num_deleted": self.num_deleted} if self.num_deleted else {}
        value = {
            "kind": _KIND,
            "format_version": FORMAT_VERSION if deleted else 1,
            "base_step": self.base_step,
            "base_tensors": self.base_tensors,
            "manifest": json.loads(self.manifest.encode()),
            "num_rows": self.num_rows,
            **deleted,
            "file": asdict(self.file),
        }
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def read_delta(folder: Path) -> Delta:
    """The delta of a folder.

    Raises:
        InputError: it is no whole delta.
    """
    path = folder / DELTA
    try:
        value = parse_json(path.read_bytes())
        if not isinstance(value, dict) or value.get("kind") != _KIND:
            raise InputError(f"{path}: expected a delta of `trainer export --since`, got something else")
        if value["format_version"] not in range(1, FORMAT_VERSION + 1):
            raise InputError(f"{path}: has format version {value['format_version']!r}, expected 1 to {FORMAT_VERSION}")
        delta = Delta(
            base_step=value["base_step"],
            base_tensors=value["base_tensors"],
            manifest=ExportManifest.decode(value["manifest"], path),
            num_rows=value["num_rows"],
            num_deleted=value.get("num_deleted", {}),
            file=ExportFile(**value["file"]),
        )
        found = (folder / DELTA_FILE).stat().st_size
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is no whole delta: {error}") from None
    if found != delta.file.num_bytes:
        raise InputError(f"{folder / DELTA_FILE}: expected {delta.file.num_bytes} bytes, got {found}")
    return delta


def write_delta(source: ExportSource, base: Base, folder: Path) -> Delta:
    """Write the delta from a base to a source into an empty folder.

    Args:
        source: with tables.
        base: of the same tables, precision and states.
        folder: empty.

    Raises:
        InputError: the base has other tables.
        OSError: a file cannot be written.
    """
    _check(source.manifest, base.manifest)
    dense = source.dense()
    changes = {key_of(file, name): words for file, tensors in dense.items() for name, words in tensors.items()}
    after = {file: {name: checksum_of(words.values) for name, words in own.items()} for file, own in dense.items()}
    before: dict[str, dict[str, dict[str, str]]] = {}
    num_rows, num_deleted = {}, {}
    layouts = source.layouts()
    for table, layout in zip(source.tables, layouts, strict=True):
        old, new = base.tensors(table, layout), source.tensors(table)
        _compare_layouts(table.table, old, new)
        ids, positions, deleted = _changed(old, new)
        num_rows[table.table] = len(ids)
        if len(deleted):
            num_deleted[table.table] = len(deleted)
            changes[deleted_key(table.table)] = Words(dtype="I64", values=deleted)
        changes[rows_key(table.table)] = Words(dtype="I64", values=ids)
        before[table.table] = {
            file: {name: base.checksum(file, name, words) for name, words in tensors.items()}
            for file, tensors in old.by_file.items()
        }
        for file, tensors in new.by_file.items():
            for name, words in tensors.items():
                after[file][name] = checksum_of(words.values)
                if name != new.place.ids:
                    changes[key_of(file, name)] = Words(dtype=words.dtype, values=words.values[positions])
    full = file_writers(folder, source.manifest, [dense, *(layout.by_file for layout in layouts)])
    files = {name: ExportFile(num_bytes=full[name].num_bytes, tensors=after[name]) for name in full}
    with TensorFileWriter(folder / DELTA_FILE, specs_of(changes), {}) as out:
        for name, words in changes.items():
            out.write(name, words.values)
    delta = Delta(
        base_step=base.manifest.step,
        base_tensors=before,
        manifest=with_program(source, folder, layouts, files),
        num_rows=num_rows,
        num_deleted=num_deleted,
        file=ExportFile(num_bytes=out.num_bytes, tensors=out.checksums),
    )
    (folder / DELTA).write_bytes(delta.encode())
    return delta


def key_of(file: str, name: str) -> str:
    """Name in `DELTA_FILE` of a tensor of a file."""
    return f"{file}:{name}"


def rows_key(table: str) -> str:
    """Name in `DELTA_FILE` of the ids of a table's rows."""
    return f"rows:{table}"


def deleted_key(table: str) -> str:
    """Name in `DELTA_FILE` of the ids of a table's deleted rows; absent if there are none."""
    return f"deleted:{table}"


def _check(ours: ExportManifest, base: ExportManifest) -> None:
    """Raise InputError unless the base is of the same rows in the same form."""
    for name, one, other in (
        ("rows", base.rows.to_json(), ours.rows.to_json()),
        ("precision", base.precision, ours.precision),
        ("optimizer states", base.has_states, ours.has_states),
    ):
        if one != other:
            raise InputError(f"--since: the base differs in its {name}: it has {one}, this export {other}")


def _compare_layouts(table: str, old: TableTensors, new: TableTensors) -> None:
    for file, tensors in new.by_file.items():
        found = old.by_file.get(file, {})
        ours = {name: (words.dtype, words.values.shape[1:]) for name, words in tensors.items()}
        theirs = {name: (words.dtype, words.values.shape[1:]) for name, words in found.items()}
        if ours != theirs:
            raise InputError(f"--since: table {table!r} of the base has tensors {theirs}, this export {ours}")
    if new.place.ids is None:
        lengths = [len(each.by_file[MODEL_FILE][each.place.weight].values) for each in (old, new)]
        if lengths[0] != lengths[1]:
            raise InputError(f"--since: table {table!r} of the base has {lengths[0]} rows, this export {lengths[1]}")


def _changed(old: TableTensors, new: TableTensors) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Ids of the rows that differ or are new, their positions among the new rows, and ids that are gone; ascending."""
    deleted = np.empty(0, np.int64)
    if new.place.ids is None:
        count = len(new.by_file[MODEL_FILE][new.place.weight].values)
        ids, places, known = np.arange(count), np.arange(count), np.ones(count, np.bool_)
    else:
        ids = new.by_file[MODEL_FILE][new.place.ids].values
        before = old.by_file[MODEL_FILE][new.place.ids].values
        places = np.minimum(np.searchsorted(before, ids), max(0, len(before) - 1))
        known = before[places] == ids if len(before) else np.zeros(len(ids), np.bool_)
        if np.count_nonzero(known) < len(before):
            deleted = np.setdiff1d(before, ids, assume_unique=True)
    differs = ~known
    both = np.flatnonzero(known)
    for file, tensors in new.by_file.items():
        for name, words in tensors.items():
            if name != new.place.ids:
                earlier = old.by_file[file][name].values
                for first in range(0, len(both), _CHUNK_ROWS):
                    part = both[first : first + _CHUNK_ROWS]
                    differs[part] |= _differ(earlier[places[part]], words.values[part])
    positions = np.flatnonzero(differs)
    return ids[positions].astype(np.int64), positions, deleted


def _differ(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """bool ``[n]``: the rows have different bytes; a NaN equals itself."""
    wide = [np.ascontiguousarray(words).reshape(len(words), -1).view(np.uint8) for words in (one, other)]
    found: NDArray[np.bool_] = (wide[0] != wide[1]).any(axis=1)
    return found
