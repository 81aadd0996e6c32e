"""`NextUseMark`: what an annotated file says of its next uses, in its metadata.

convert --next-use ──> columns ID.next_use, uint32  +  NextUseMark ──data.next_use_source──> checked, then read
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from bagpipe.util.documents import parse_json

__all__ = ["MARK_KEY", "NextUseMark", "schema_digest"]

#: Key of the mark in a file's metadata, and the version of its layout.
MARK_KEY = b"bagpipe.next_use"
MARK_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NextUseMark:
    """The order whose next uses the files of one run of `convert --next-use` tell.

    Attributes:
        run: name of the run.
        file, num_files: number of this file, and the files of the run.
        rows: of this file.
        num_rows: of all files.
        train_rows: rows of an epoch, the first ones of the files; the others have no next uses.
        seed: of the shuffled order (`run.seed`); None: the order of the files, whose last row is followed by the first.
        epochs: annotated epochs of a shuffled order; 1 for that of the files.
        layout: rule of the blocks that are shuffled.
        schema: digest of features and tables.
    """

    run: str
    file: int
    num_files: int
    rows: int
    num_rows: int
    train_rows: int
    seed: int | None
    epochs: int
    layout: str
    schema: str

    @property
    def is_shuffled(self) -> bool:
        return self.seed is not None

    def column(self, name: str, epoch: int) -> str:
        """The column of next uses of an id column in an epoch."""
        return f"{name}.next_use.{epoch}" if self.is_shuffled else f"{name}.next_use"

    def metadata(self) -> dict[bytes, bytes]:
        """File metadata that holds the mark."""
        value = {"version": MARK_VERSION, **dataclasses.asdict(self)}
        return {MARK_KEY: json.dumps(value, sort_keys=True).encode()}

    @classmethod
    def of(cls, path: str, metadata: Mapping[bytes, bytes] | None) -> NextUseMark | None:
        """The mark in a file's metadata, or None.

        Raises:
            InputError: it is damaged or of another version.
        """
        text = (metadata or {}).get(MARK_KEY)
        if text is None:
            return None
        try:
            value: dict[str, Any] = parse_json(text)
            version = value.pop("version")
            if version != MARK_VERSION:
                raise InputError(f"{path}: expected next uses of version {MARK_VERSION}, got {version!r}")
            mark = cls(**value)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{path}: the description of next uses in the file's metadata is damaged") from None
        for field in dataclasses.fields(cls):
            kind = str if field.name in ("run", "layout", "schema") else int
            value_of = getattr(mark, field.name)
            if type(value_of) is not kind and not (field.name == "seed" and value_of is None):
                raise InputError(f"{path}: the description of next uses in the file's metadata is damaged")
        return mark


def schema_digest(schema: DataSchema) -> str:
    """Hexadecimal digits that change with the features, their tables, or how ids are folded into these."""
    tables = {table.name: [table.rows, table.hash] for table in schema.tables}
    found = [[feature.name, feature.table, tables[feature.table]] for feature in schema.features]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
