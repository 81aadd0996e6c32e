"""`Manifest`: what a checkpoint is. Pure records; `bagpipe.checkpoint.codec` makes their JSON.

rank r ──Part──> part-<r>.json ──┐
…                                ├──Manifest──> manifest.json
settings, schemas, seeds ────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.errors import InputError

__all__ = ["FORMAT_VERSION", "BrokenCheckpoint", "FileEntry", "Manifest", "Part", "RowFile"]

#: Of the manifest and of all files it names. A newer one is refused.
FORMAT_VERSION = 1


class BrokenCheckpoint(InputError):
    """A file of a checkpoint is missing, cut or changed: another checkpoint may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint's directory.

    Attributes:
        name: in the directory.
        num_bytes: its length.
        xxh3_128: checksum of all of it, hexadecimal.
    """

    name: str
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """Rows of one width, sorted by (table, id), each once; see `bagpipe.checkpoint.row_file`.

    Attributes:
        file: the file.
        row_bytes: of one record.
        num_rows: records in the file.
        full: it holds every row of its width that existed at `step`; earlier files are not needed.
        step: the checkpoint that it was made for.
    """

    file: FileEntry
    row_bytes: int
    num_rows: int
    full: bool
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank contributes.

    Attributes:
        rank: it.
        dense: its file of the dense part.
        rows: rows that changed since the checkpoint before, by width.
        dirty: names of the rows that were newer in its cache than in the store.
        num_groups: per bucket, groups in its log of the interval that ends here.
        progress: what the rank resumes from: samples, loss_sum, reader_state, …; floats read back exactly.
    """

    rank: int
    dense: FileEntry
    rows: tuple[RowFile, ...] = ()
    dirty: FileEntry | None = None
    num_groups: tuple[int, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        format_version: see `FORMAT_VERSION`.
        lineage: 32 hexadecimal digits, drawn when the job began from nothing; kept by all that resume from it.
        generation: how often jobs have been started on this folder; orders checkpoints before their step does.
        step: batches trained; the next to be trained has this number.
        parent_checkpoint_id: id of the checkpoint that the logs of the interval before are relative to.
        token, epoch: of those logs.
        world_size: ranks.
        settings: configuration that results depend on, by key; JSON values.
        row_schema: `RowSchema.to_json`.
        identity: of the data, as the cacher says it.
        parts: by rank.
        base: row files of earlier checkpoints (and the last full ones) that this one builds on, oldest first.
    """

    format_version: int = FORMAT_VERSION
    lineage: str
    generation: int
    step: int
    parent_checkpoint_id: str
    token: str
    epoch: int
    world_size: int
    settings: Mapping[str, Any]
    row_schema: Mapping[str, Any]
    identity: Mapping[str, str]
    parts: tuple[Part, ...] = ()
    base: tuple[RowFile, ...] = ()

    @property
    def checkpoint_id(self) -> str:
        """What a store's buckets say once the checkpoint is committed there.

        By token, not by generation: a folder and its copy count their generations alike.
        """
        return f"{self.lineage}:{self.token}:{self.step}"

    @property
    def reader_state(self) -> Mapping[str, Any] | None:
        """Position of the data reader before batch `step`; None: at the beginning."""
        return self.parts[0].progress.get("reader_state") if self.parts else None

    @property
    def row_files(self) -> tuple[RowFile, ...]:
        """All of them, oldest first."""
        return self.base + tuple(file for part in self.parts for file in part.rows)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Everything in the checkpoint's folder that is needed to resume from it."""
        own = [entry for part in self.parts for entry in (part.dense, part.dirty) if entry is not None]
        return (*own, *(file.file for file in self.row_files))
