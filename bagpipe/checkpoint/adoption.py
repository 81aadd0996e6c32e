"""`adopt`: makes the rows of another job the first checkpoint of this one (`store.existing = rows-only`).

ledger.acquire: all other writers are fenced out
store ──ids, read──> full row files ──publish──> checkpoint of step 0 ──ledger.begin──> the rows belong to it
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import Manifest, RowFile
from bagpipe.checkpoint.row_file import RecordFile, file_dtype, words_as
from bagpipe.store.audit import every_row
from bagpipe.store.fencing.fence import Ledger
from bagpipe.store.interface import Store
from bagpipe.util.failpoints import hit

__all__ = ["adopt"]


def adopt(
    store: Store, ledger: Ledger, *, token: str, folder: CheckpointFolder, manifest: Manifest, num_writers: int
) -> Checkpoint:
    """Publish the store's rows as a checkpoint and begin from it. The rows are not changed.

    After a kill it can be repeated: no row is trained before `Ledger.begin` has set the id of every bucket.

    Args:
        store: open store whose rows are adopted.
        ledger: entered ledger.
        token: fencing token of this job.
        folder: folder of the checkpoints.
        manifest: manifest of the checkpoint, without rows.
        num_writers: number of ranks of this job.

    Raises:
        FencedError: another job has begun since.
        StoreError: the store failed.
        OSError: the folder cannot be written.
    """
    ledger.acquire(token)
    hit("after-acquire")
    files = _save_rows(store, folder.step_folder(manifest.generation, manifest.step), manifest.step)
    checkpoint = folder.publish(replace(manifest, base=files))
    hit("before-begin")
    num_rows = [state.num_rows for state in ledger.state()]
    ledger.begin(checkpoint.manifest.checkpoint_id, num_writers, num_rows=num_rows)
    hit("after-begin")
    return checkpoint


def _save_rows(store: Store, folder: Path, step: int) -> tuple[RowFile, ...]:
    """Write all rows of the store into full row files, one per row width that has rows."""
    schema = store.schema
    files: dict[int, RecordFile] = {}
    with ExitStack() as stack:
        for table, ids, result in every_row(store, range(len(schema.tables))):
            row_bytes = schema.row_bytes(table)
            if row_bytes not in files:
                path = folder / f"full-{step:08d}-{row_bytes:06d}.npy"
                files[row_bytes] = stack.enter_context(RecordFile(path, file_dtype(schema, row_bytes)))
            file = files[row_bytes]
            records = np.zeros(len(ids), file.dtype)
            records["id"], records["table"], records["step"] = ids, table, step
            records["row"] = words_as(result.rows, file.dtype["row"].base)
            file.write(records)
    return tuple(
        RowFile(file=file.entry, row_bytes=row_bytes, num_rows=file.num_records, full=True, step=step)
        for row_bytes, file in sorted(files.items())
    )
