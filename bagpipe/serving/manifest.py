"""`ExportManifest`: what an exported model is, in ``manifest.json`` beside its files. Pure records and their JSON.

    schema of rows and data, columns of the program, rule of initial rows, settings, versions ─┐
    files: length, SHA-256 of the file or of each tensor in it ────────────────────────────────┴──> manifest.json

A manifest has no time and no path: two exports of one checkpoint have equal manifests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bagpipe.errors import InputError
from bagpipe.serving.initial_rows import RULE
from bagpipe.types.schema import DataSchema, RowSchema
from bagpipe.util.documents import parse_json

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "PROGRAM_FILE",
    "Column",
    "ExportFile",
    "ExportManifest",
    "Precision",
    "TableFiles",
    "file_checksum",
    "read_manifest",
]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL_FILE, OPTIMIZER_FILE, PROGRAM_FILE = "model.safetensors", "optimizer.safetensors", "dense.pt2"

#: Number type of exported rows: that of the table, float16, or 8 bits a weight with a scale and an offset for each row.
Precision = Literal["exact", "fp16", "int8"]

_KIND = "bagpipe export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """An input of the program: the pooled vectors of one feature from one table.

    Attributes:
        name: of the input: that of the feature, or ``feature@table`` if it is read from several tables.
        feature: of the data.
        table: of the row schema.
        pooling: ``sum`` or ``mean`` of a bag's rows; an empty bag is a zero vector.
        weighted: ids have weights, which multiply their rows.
        dim: width of a vector.
    """

    name: str
    feature: str
    table: str
    pooling: str
    weighted: bool
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """The place of a table's rows in `MODEL_FILE`.

    Attributes:
        name: of the table, in the row schema.
        weight: name of the tensor ``[n, dim]``; with int8, of its codes, beside ``.scale`` and ``.offset`` ``[n]``.
        ids: name of the tensor of its ids, ascending; None: row i is that of id i.
        dtype: of the weights in the file: a key of `ROW_TYPES`, or int8.
    """

    name: str
    weight: str
    ids: str | None
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file of the export.

    Attributes:
        num_bytes: its length.
        sha256: of the whole file; empty for a safetensors file.
        tensors: SHA-256 of each tensor in a safetensors file, by name.
    """

    num_bytes: int
    sha256: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """An exported model.

    Attributes:
        step: batches trained.
        checkpoint: id of the checkpoint it was made from.
        rows: tables, dims, dtypes and seed: what `InitialRows` needs for rows that are in no file.
        data: columns of the data; tables with ``hash`` map ids by `bagpipe.types.splitmix64.hash_ids`.
        columns: inputs of the program, in order.
        program: whether there is a `PROGRAM_FILE`.
        no_program: why there is none.
        rows_in: ``files``, or ``store``: rows are read from the job's namespace.
        precision: of the rows in the files.
        has_states: there is an `OPTIMIZER_FILE`.
        averages: dense weights are the moving averages of the trained ones.
        tables: of the rows in the files.
        decay: factor of the initial weights of new rows, by table; for tables whose rows decay. None: no
            factor says it, so new rows cannot be read.
        settings: configuration of the job that affects results, by key.
        versions: of bagpipe and torch.
        files: by name.
    """

    step: int
    checkpoint: str
    rows: RowSchema
    data: DataSchema
    columns: tuple[Column, ...]
    program: bool
    no_program: str = ""
    rows_in: Literal["files", "store"] = "files"
    precision: Precision = "exact"
    has_states: bool = True
    averages: bool = False
    tables: tuple[TableFiles, ...] = ()
    decay: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, ExportFile] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Content of ``manifest.json``."""
        value = {
            **{name: _plain(getattr(self, name)) for name in _FIELDS},
            "kind": _KIND,
            "format_version": FORMAT_VERSION,
            "initial_rows": {"rule": RULE, "seed": self.rows.seed},
        }
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, value: Any, path: Path) -> ExportManifest:
        """The manifest of parsed JSON.

        Raises:
            InputError: it is not one, is of a newer version, or its unseen rows have another rule.
        """
        if not isinstance(value, dict) or value.get("kind") != _KIND:
            raise InputError(f"{path}: expected the manifest of an export, got something else")
        if value.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"{path}: the export has format version {value.get('format_version')!r}, this bagpipe reads version "
                f"{FORMAT_VERSION}"
            )
        rule = value.get("initial_rows", {}).get("rule")
        if rule != RULE:
            raise InputError(f"{path}: rows that were never trained have rule {rule!r}, this bagpipe knows {RULE}")
        try:
            return cls(
                **{
                    **{name: value[name] for name in _FIELDS},
                    "rows": RowSchema.from_json(value["rows"], f"{path}: rows"),
                    "data": DataSchema.from_json(value["data"], f"{path}: data"),
                    "columns": tuple(Column(**column) for column in value["columns"]),
                    "tables": tuple(TableFiles(**table) for table in value["tables"]),
                    "files": {name: ExportFile(**file) for name, file in value["files"].items()},
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: the manifest of an export lacks a field, or has another: {error}") from None

    def table_of(self, name: str) -> TableFiles:
        """The place of a table's rows. KeyError if there is none of that name."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)


_FIELDS = tuple(item.name for item in dataclasses.fields(ExportManifest))


def read_manifest(folder: Path) -> ExportManifest:
    """The manifest of an export, whose files have the lengths that it says.

    Raises:
        InputError: `folder` is no whole export.
    """
    path = folder / MANIFEST
    try:
        manifest = ExportManifest.decode(parse_json(path.read_bytes()), path)
        for name, file in manifest.files.items():
            found = (folder / name).stat().st_size
            if found != file.num_bytes:
                raise InputError(f"{folder / name}: expected {file.num_bytes} bytes, got {found}")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    return manifest


def file_checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, (RowSchema, DataSchema)):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
