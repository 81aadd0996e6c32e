"""How fast are a checkpoint's rows written, checked and read?

    python -m benchmarks.checkpoint.main [--rows 10000000] [--dim 16] [--repeat 3] [--folder DIR] [--json FILE]

One table, Adagrad: records of ``2 * dim`` floats. A full file of all rows, and one of a tenth that changed since.
*Cold* means that the kernel was told to forget the files' pages before each measurement (POSIX_FADV_DONTNEED), so that
they come from the disk; `read` is the least that loading must do: the same bytes through one buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bagpipe.checkpoint.files import finish
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter
from bagpipe.checkpoint.manifest import Manifest, Part, RowFile
from bagpipe.checkpoint.merge import merge_files
from bagpipe.checkpoint.reader import CheckpointRows
from bagpipe.store.interface import WriteRequest
from bagpipe.types.schema import RowSchema, RowTable

#: Rows of one batch's write-back.
_BATCH_ROWS = 16_384
#: Rows looked up at once.
_LOOKED_UP = 65_536


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(Path(folder), options.rows, options.dim, options.repeat)
    print(f"{options.rows:,} rows of {8 * options.dim} B")
    print("| what | seconds | MB/s of records | M rows/s |")
    print("|---|---|---|---|")
    for result in results:
        print(f"| {result['what']} | {result['seconds']} | {result['mb_per_s']} | {result['million_rows_per_s']} |")
    if options.json:
        machine = {"python": platform.python_version(), "numpy": np.__version__}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


def measure(path: Path, num_rows: int, dim: int, repeat: int) -> list[dict[str, object]]:
    """Medians of `repeat` runs; writing is measured once."""
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

    def timed(what: str, work: Callable[[], object], rows: int, *, cold: bool) -> None:
        seconds = []
        for _ in range(repeat):
            if cold:
                _forget(path)
            start_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start_s)
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
    timed("read, cold", lambda: _read_plainly(checkpoint), in_files, cold=True)
    timed("check, cold", lambda: folder.newest(_complain), in_files, cold=True)
    timed("check, from memory", lambda: folder.newest(_complain), in_files, cold=False)
    timed("all rows, from memory", lambda: sum(len(group) for group in rows().requests()), num_rows, cold=False)
    timed(
        "check, then all rows: a load, cold",
        lambda: (folder.newest(_complain), sum(len(group) for group in rows().requests())),
        num_rows,
        cold=True,
    )
    opened = rows()
    wanted = np.sort(random.choice(ids, min(_LOOKED_UP, num_rows), replace=False))
    timed(f"look up {len(wanted):,} rows, from memory", lambda: opened.read(0, wanted), len(wanted), cold=False)
    timed("build the index of ids", lambda: rows().build_index(), num_rows, cold=False)
    opened.build_index()
    timed(f"are {len(wanted):,} rows there?", lambda: opened.contains(0, wanted), len(wanted), cold=False)
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


def _forget(path: Path) -> None:
    """Tell the kernel that nobody will need the files' pages."""
    for file in path.rglob("*.npy"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _complain(text: str) -> None:
    raise RuntimeError(text)


if __name__ == "__main__":
    main()
