"""Part `rows`: the row files of a checkpoint are written, merged, checked, loaded and searched.

One table with Adagrad: records of ``2 * dim`` floats. A full file of all rows, and a file of the tenth that changed
since.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.files import finish
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter
from bagpipe.checkpoint.manifest import Manifest, Part, RowFile
from bagpipe.checkpoint.merge import merge_files
from bagpipe.store.interface import WriteRequest
from bagpipe.types.schema import RowSchema, RowTable
from benchmarks.harness.rounds import timed

__all__ = ["measure_row_files"]

#: Rows of one batch's write-back.
_BATCH_ROWS = 16_384
#: Rows looked up at once.
_LOOKED_UP = 65_536


def measure_row_files(path: Path, num_rows: int, dim: int, repeats: int) -> list[dict[str, object]]:
    """Figures of every operation: medians of `repeats` runs; writing is measured once.

    *Cold*: the kernel dropped the files' pages before each run (POSIX_FADV_DONTNEED), so they come from the disk. The
    lower bound of a load is `read`: the same bytes through one buffer.
    """
    schema = RowSchema(tables=(RowTable(name="table", dim=dim),), optimizer="adagrad")
    record_bytes = 8 * dim
    folder = CheckpointFolder(path)
    generation = folder.new_generation()
    random = np.random.default_rng(0)
    results: list[dict[str, object]] = []

    def note(what: str, seconds: float, rows: int) -> None:
        results.append(
            {
                "what": what,
                "seconds": round(seconds, 3),
                "mb_per_s": round(rows * record_bytes / seconds / 1e6),
                "million_rows_per_s": round(rows / seconds / 1e6, 2),
            }
        )

    def repeated(what: str, work: Callable[[], object], rows: int, *, cold: bool) -> None:
        seconds = []
        for _ in range(repeats):
            if cold:
                _drop_page_cache(path)
            seconds.append(timed(work)[0])
        note(what, statistics.median(seconds), rows)

    def write(step: int, ids: np.ndarray[tuple[int], np.dtype[np.int64]], what: str) -> tuple[RowFile, ...]:
        writer = RowWriter(folder.generation_folder(generation), schema, rank=0, epoch=step)
        rows = random.random((_BATCH_ROWS, 2 * dim), np.float32)
        start_s = time.perf_counter()
        for first in range(0, len(ids), _BATCH_ROWS):
            chunk = ids[first : first + _BATCH_ROWS]
            writer.append([WriteRequest(0, chunk, rows[: len(chunk)])], step)
        appended_s = time.perf_counter()
        files = writer.seal(folder.step_folder(generation, step), step)
        note(f"journal: append {what}", appended_s - start_s, len(ids))
        note(f"journal: sort, write, sync {what}", time.perf_counter() - appended_s, len(ids))
        return files

    ids = random.permutation(num_rows).astype(np.int64) * 7919
    first = write(10, ids, "all rows")
    where = folder.step_folder(generation, 10)
    start_s = time.perf_counter()
    full = merge_files(where, first, schema, target=where, step=10)
    note("merge one file into a full one", time.perf_counter() - start_s, num_rows)
    checkpoint = _publish(folder, generation, 20, schema, full, write(20, ids[: num_rows // 10], "a tenth"), where)

    def rows() -> CheckpointRows:
        return CheckpointRows(checkpoint.folder, checkpoint.manifest, schema)

    in_files = num_rows + num_rows // 10
    repeated("read, cold", lambda: _read_plainly(checkpoint), in_files, cold=True)
    repeated("check, cold", lambda: folder.newest(_fail), in_files, cold=True)
    repeated("check, from memory", lambda: folder.newest(_fail), in_files, cold=False)
    repeated("all rows, from memory", lambda: sum(len(group) for group in rows().requests()), num_rows, cold=False)
    repeated(
        "check, then all rows: a load, cold",
        lambda: (folder.newest(_fail), sum(len(group) for group in rows().requests())),
        num_rows,
        cold=True,
    )
    opened = rows()
    wanted = np.sort(random.choice(ids, min(_LOOKED_UP, num_rows), replace=False))
    repeated(f"look up {len(wanted):,} rows, from memory", lambda: opened.read(0, wanted), len(wanted), cold=False)
    repeated("build the index of ids", lambda: rows().build_index(), num_rows, cold=False)
    opened.build_index()
    repeated(f"are {len(wanted):,} rows there?", lambda: opened.contains(0, wanted), len(wanted), cold=False)
    target = path / "merged"
    target.mkdir()
    start_s = time.perf_counter()
    merge_files(checkpoint.folder, checkpoint.manifest.row_files, schema, target=target, step=20)
    note("merge both into a full file", time.perf_counter() - start_s, num_rows)
    return results


def _publish(
    folder: CheckpointFolder,
    generation: int,
    step: int,
    schema: RowSchema,
    base: tuple[RowFile, ...],
    rows: tuple[RowFile, ...],
    source: Path,
) -> Checkpoint:
    where = folder.step_folder(generation, step)
    dense = where / "dense-0000.safetensors"
    dense.write_bytes(b"none is needed here")
    manifest = Manifest(
        lineage="0" * 32,
        generation=generation,
        step=step,
        parent_checkpoint_id="",
        token=f"{generation}-{'0' * 32}",
        epoch=1,
        world_size=1,
        settings={},
        row_schema=schema.to_json(),
        identity={},
        parts=(Part(rank=0, dense=finish(dense), rows=rows),),
        base=base,
    )
    return folder.publish(manifest, (source,))


def _read_plainly(checkpoint: Checkpoint) -> None:
    buffer = bytearray(1 << 20)
    for entry in checkpoint.manifest.files:
        with (checkpoint.folder / entry.name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop_page_cache(path: Path) -> None:
    """Make the kernel drop the files' pages."""
    for file in path.rglob("*.npy"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _fail(text: str) -> None:
    raise RuntimeError(text)
