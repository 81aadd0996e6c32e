"""`compact`: a checkpoint without some of its rows, published as the newest of its step.

    newest_at_rest ──Checkpoint, whole, of no running job──> kept_rows: rows of each table, and those that stay
                                                         └─> compact: full row files, dense files as links,
                                                             sums of the rows ──publish──> a generation of its own

The store is not touched. The checkpoint keeps its id, so the logs of a bucket still name the rows that can differ; a
bucket that lost rows holds more than the checkpoint, and recovery loads it from the files. The checkpoint before stays
in the folder until the job's next checkpoints replace it. A kill leaves a generation without a checkpoint, which the
next start of the job passes over and removes.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.files import link_or_copy
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import Manifest
from bagpipe.checkpoint.merge import IsKept, merge_files
from bagpipe.errors import InputError
from bagpipe.types.schema import RowSchema
from bagpipe.util.outputs import reason_of

__all__ = ["KeptRows", "compact", "kept_rows", "newest_at_rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """Rows of one table before a compaction, and those that stay."""

    num_rows: int
    num_kept: int


def newest_at_rest(folder: CheckpointFolder) -> Checkpoint:
    """The newest checkpoint of a folder on which no job runs.

    Raises:
        InputError: a job runs, there is no checkpoint of trained rows, or the newest one is not whole.
    """
    _check_holder(folder, folder.holder())
    positions = folder.positions()
    problems: list[str] = []
    found = folder.newest(problems.append)
    if found is None or not found.manifest.parts:
        raise InputError(f"checkpoint.dir {folder.path} has no checkpoint of trained rows")
    if found.position != positions[0]:
        raise InputError(problems[0].replace("is broken and skipped", "is the newest one and is broken"))
    return found


def kept_rows(rows: CheckpointRows, is_kept: IsKept) -> list[KeptRows]:
    """For each table, its rows and how many of them stay. Reads the ids alone."""
    found = []
    for table in range(len(rows.schema.tables)):
        ids = rows.ids(table)
        found.append(KeptRows(num_rows=len(ids), num_kept=int(np.count_nonzero(is_kept(table, ids)))))
    return found


def compact(
    folder: CheckpointFolder,
    checkpoint: Checkpoint,
    is_kept: IsKept,
    *,
    on_chunk: Callable[[int], None] = lambda num_rows: None,
) -> Checkpoint:
    """Publish a checkpoint of the same step with the rows that stay.

    Args:
        folder: of the checkpoints.
        checkpoint: of `newest_at_rest`.
        is_kept: tells the rows that stay.
        on_chunk: called after each chunk with the number of rows that it was read from.

    Raises:
        InputError: a job runs on the folder or has run since `newest_at_rest`, or the folder cannot be written. The
            folder is as before.
    """
    generation = folder.new_generation()
    try:
        _check_holder(folder, folder.holder(before=generation))
        if folder.positions()[:1] != (checkpoint.position,):
            raise InputError(f"checkpoint.dir {folder.path}: a job has made a newer checkpoint meanwhile: start again")
        folder.note_start(generation, f"{generation}-{secrets.token_hex(16)}", checkpoint)
        target = folder.step_folder(generation, checkpoint.manifest.step)
        manifest = _without_rows(checkpoint.manifest, generation)
        for entry in manifest.files:
            link_or_copy(checkpoint.folder / entry.name, target / entry.name)
        schema = RowSchema.from_json(manifest.row_schema)
        files = merge_files(
            checkpoint.folder,
            checkpoint.manifest.row_files,
            schema,
            target=target,
            step=manifest.step,
            on_chunk=on_chunk,
            is_kept=is_kept,
        )
        manifest = dataclasses.replace(manifest, base=files)
        published = folder.publish(_with_sums(manifest, target, schema))
    except OSError as error:
        folder.abandon(generation)
        raise InputError(f"checkpoint.dir {folder.path} cannot be written: {reason_of(error)}") from None
    except BaseException:
        if (generation, checkpoint.manifest.step) not in folder.positions():  # interrupted before it was published
            folder.abandon(generation)
        raise
    folder.release()
    return published


def _check_holder(folder: CheckpointFolder, running: str) -> None:
    if running:
        raise InputError(f"checkpoint.dir {folder.path} is in use by {running}: wait for that job's end or stop it")


def _without_rows(manifest: Manifest, generation: int) -> Manifest:
    """The manifest with the dense parts and the names of dirty rows alone."""
    parts = tuple(dataclasses.replace(part, rows=()) for part in manifest.parts)
    # No parent: a store with the parent's id is loaded from files.
    return dataclasses.replace(manifest, generation=generation, parent_checkpoint_id="", parts=parts, base=())


def _with_sums(manifest: Manifest, folder: Path, schema: RowSchema) -> Manifest:
    """The manifest with the sums of its rows, if those of the checkpoint before are known."""
    num_buckets = len(manifest.row_sums)
    if not num_buckets:
        return manifest
    rows = CheckpointRows(folder, manifest, schema)
    sums = rows.sums(num_buckets) - rows.dirty_sums(num_buckets)
    return dataclasses.replace(manifest, row_sums=tuple(sums.to_list()))
