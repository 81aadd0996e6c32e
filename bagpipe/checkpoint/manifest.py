"""`Manifest`: description of a checkpoint. Pure records; `bagpipe.checkpoint.codec` encodes them as JSON.

rank r ──Part──> part-<r>.json ──┐
…                                ├──Manifest──> manifest.json
settings, schemas, seeds ────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.errors import InputError

__all__ = [
    "DATA_COLUMNS",
    "FORMAT_VERSION",
    "KNOWN_ROWS",
    "VERSION_WITHOUT_DELETIONS",
    "VERSION_WITHOUT_KNOWN_ROWS",
    "BrokenCheckpoint",
    "FileEntry",
    "Manifest",
    "Part",
    "RowFile",
]

#: Format version of the manifest and its files. Newer versions are rejected. Version 2 added `Manifest.arithmetic`
#: and the content of the data files, version 3 the sums of rows, version 4 `Manifest.changes`, version 5
#: `Manifest.origin`, version 6 pieces of tensors in the dense files, version 7 files of deletions: a manifest without
#: any is written as `VERSION_WITHOUT_DELETIONS`. Version 8 added known rows: a manifest without is written as
#: `VERSION_WITHOUT_KNOWN_ROWS`, or the one before.
FORMAT_VERSION = 8
VERSION_WITHOUT_KNOWN_ROWS = 7
VERSION_WITHOUT_DELETIONS = 6

#: Key of a file in `Manifest.origin`, and its name.
_KNOWN = "known_rows"
KNOWN_ROWS = "known-rows.npy"

#: Key of the columns of the data (`DataSchema.to_json`) in `Manifest.settings`, of jobs that read data of a schema.
DATA_COLUMNS = "data columns"


class BrokenCheckpoint(InputError):
    """A file of a checkpoint is missing, truncated or changed. Another checkpoint can be valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint's directory.

    Attributes:
        name: file name in the directory.
        num_bytes: file length.
        xxh3_128: hexadecimal checksum of the whole file.
    """

    name: str
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """Distinct rows of one width, or deletions of rows, sorted by (table, id); see `bagpipe.checkpoint.row_file`.

    Attributes:
        file: the file.
        row_bytes: bytes of one row; 0: the file has deletions.
        num_rows: records in the file.
        full: the file holds every row of its width that existed at `step`; earlier files are not needed.
        step: step of the checkpoint that created the file.
    """

    file: FileEntry
    row_bytes: int
    num_rows: int
    full: bool
    step: int

    @property
    def is_deletions(self) -> bool:
        """Whether the file names rows that were deleted, of tables of any width."""
        return not self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a checkpoint.

    Attributes:
        rank: the rank.
        dense: file of its dense part.
        rows: rows changed since the previous checkpoint, one file per width; deletions of rows, in one file.
        dirty: names of rows newer in its cache than in the store.
        num_groups: per bucket, groups in its log of the interval that ends here.
        row_sums: per bucket, the rank's share of `Manifest.row_sums`: the change by its writes since the job's start,
            without the stored values of its dirty rows.
        progress: counters to resume from; floats are exact. ``steps``, the counters of all parts of the training loop
            (samples, skipped batches, reader state, loss scale), ``loss_sum``, ``loss_sums`` by counter, and ``dense``:
            digests of parameters and optimizer state by chunk, equal on replicas. The digests exclude buffers, which
            stay local during training.
    """

    rank: int
    dense: FileEntry
    rows: tuple[RowFile, ...] = ()
    dirty: FileEntry | None = None
    num_groups: tuple[int, ...] = ()
    row_sums: tuple[int, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        format_version: see `FORMAT_VERSION`.
        lineage: 32 random hexadecimal digits, drawn at the first start; all resumed jobs keep them.
        generation: number of starts on this folder; checkpoints are ordered by generation, then step.
        step: number of trained batches, which is the number of the next batch.
        parent_checkpoint_id: id of the checkpoint at which the logs of the preceding interval begin.
        token, epoch: fencing token and epoch of those logs.
        world_size: number of ranks.
        settings: configuration that affects results, by key; JSON values.
        changes: settings that resumes have changed (`checkpoint.change`), oldest first: key, step from which the new
            value holds, values before and after.
        origin: what the job's first checkpoint was made from (`bagpipe.start_from`): ``takings``; batches of earlier
            jobs that row optimizers (``rows_step``), learning rates (``schedule_step``), the turns of the dense part
            (``dense_step``) and the stages' random numbers (``masks_step``) count; ``checkpoint_id``; ``known_rows``,
            the file of the names of the rows that it began with, if the job counts or follows the uses of rows.
            Empty: initial values.
        row_schema: `RowSchema.to_json`.
        identity: `BatchIdentity.to_json`, from the cacher; in version 1 digests by name; empty if not known.
        arithmetic: by rank, what its sums depend on besides the settings (`bagpipe.jobs.arithmetic`); empty if not
            recorded.
        parts: the ranks' parts, by rank.
        base: row files of earlier checkpoints that this one builds on, from the last full ones, oldest first.
        row_sums: per bucket, the sum of all rows but the dirty ones (`bagpipe.store.row_sums`), as it follows
            from what was written and what that replaced. The files hold other rows if a row was trained from a value
            that was not the last one written. Empty: not known.
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
    identity: Mapping[str, Any]
    arithmetic: tuple[Mapping[str, str], ...] = ()
    changes: tuple[Mapping[str, Any], ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    base: tuple[RowFile, ...] = ()
    row_sums: tuple[int, ...] = ()

    @property
    def checkpoint_id(self) -> str:
        """Checkpoint id that a commit sets in the store's buckets.

        Contains the token instead of the generation: a folder and its copy use the same generation numbers.
        """
        return f"{self.lineage}:{self.token}:{self.step}"

    @property
    def reader_state(self) -> Mapping[str, Any] | None:
        """Reader state before batch `step`; None: start of the data."""
        return self.parts[0].progress.get("reader_state") if self.parts else None

    @property
    def row_files(self) -> tuple[RowFile, ...]:
        """All row files, oldest first."""
        return self.base + tuple(file for part in self.parts for file in part.rows)

    @property
    def known_rows(self) -> FileEntry | None:
        """The file of the names of the rows that the job began with; None: it has none, or needs none."""
        return FileEntry(**self.origin[_KNOWN]) if _KNOWN in self.origin else None

    @property
    def linked(self) -> tuple[FileEntry, ...]:
        """The files that earlier checkpoints have too."""
        return (*(file.file for file in self.base), *filter(None, [self.known_rows]))

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files needed to resume from the checkpoint."""
        own = [entry for part in self.parts for entry in (part.dense, part.dirty) if entry is not None]
        return (*own, *(file.file for file in self.row_files), *filter(None, [self.known_rows]))
