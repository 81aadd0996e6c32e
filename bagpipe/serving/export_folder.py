"""`ExportSource`, `write_export`: an export folder from the rows and the dense part of a checkpoint.

ExportSource ──dense tensors, then table by table──> model.safetensors, optimizer.safetensors ─┐
             ──save_program────────────────────────> dense.pt2 ────────────────────────────────┴──> manifest.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bagpipe.cache.row_history import RowHistory
from bagpipe.checkpoint.export import ExportTable, RowSource
from bagpipe.serving.manifest import (
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PROGRAM_FILE,
    ExportFile,
    ExportManifest,
    file_checksum,
)
from bagpipe.serving.table_tensors import FileTensors, TableTensors, layout_of, specs_of, tensors_of, words_of
from bagpipe.serving.tensor_file import TensorFileWriter

__all__ = ["ExportSource", "file_writers", "with_program", "write_export"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportSource:
    """The content of an export.

    Attributes:
        manifest: without tables and files.
        rows: of the checkpoint.
        history: the decay of the rows.
        tables: all tables of its row schema, by their names in the model; empty if rows stay in the store.
        weights: dense weights, by name.
        states: optimizer states of the dense part, by name.
        save_program: writes the program to a path; None: there is none.
    """

    manifest: ExportManifest
    rows: RowSource
    history: RowHistory
    tables: tuple[ExportTable, ...]
    weights: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    save_program: Callable[[Path], object] | None

    def dense(self) -> FileTensors:
        """The tensors of the dense part, by file."""
        found = {MODEL_FILE: {name: words_of(tensor) for name, tensor in self.weights.items()}}
        if self.manifest.has_states:
            found[OPTIMIZER_FILE] = {name: words_of(tensor) for name, tensor in self.states.items()}
        return found

    def layouts(self) -> list[TableTensors]:
        """The tensors of every table, without values."""
        manifest = self.manifest
        return [
            layout_of(self.rows, table, self.history, manifest.precision, states=manifest.has_states)
            for table in self.tables
        ]

    def tensors(self, table: ExportTable) -> TableTensors:
        """The tensors of one table. Raises `InputError`, see `tensors_of`."""
        return tensors_of(self.rows, table, self.history, self.manifest.precision, states=self.manifest.has_states)


def write_export(source: ExportSource, folder: Path) -> ExportManifest:
    """Write all files of an export into an empty folder.

    Raises:
        InputError: a table has a row that does not fit.
        OSError: a file cannot be written.
    """
    layouts, dense = source.layouts(), source.dense()
    with ExitStack() as stack:
        writers = file_writers(folder, source.manifest, [dense, *(layout.by_file for layout in layouts)])
        for writer in writers.values():
            stack.enter_context(writer)
        _write(writers, dense)
        for table in source.tables:
            _write(writers, source.tensors(table).by_file)
    files = {name: ExportFile(num_bytes=writer.num_bytes, tensors=writer.checksums) for name, writer in writers.items()}
    manifest = with_program(source, folder, layouts, files)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


def with_program(
    source: ExportSource, folder: Path, layouts: Sequence[TableTensors], files: Mapping[str, ExportFile]
) -> ExportManifest:
    """Write the program, if there is one. Returns the whole manifest.

    Raises:
        OSError: the file cannot be written.
    """
    files = dict(files)
    if source.save_program is not None:
        path = folder / PROGRAM_FILE
        source.save_program(path)
        files[PROGRAM_FILE] = ExportFile(num_bytes=path.stat().st_size, sha256=file_checksum(path))
    return replace(
        source.manifest,
        program=source.save_program is not None,
        tables=tuple(layout.place for layout in layouts),
        files=files,
    )


def file_writers(folder: Path, manifest: ExportManifest, parts: Sequence[FileTensors]) -> dict[str, TensorFileWriter]:
    """Writers of the files, not entered yet, for the tensors of all parts."""
    metadata = {"step": str(manifest.step), "lineage": manifest.checkpoint.partition(":")[0]}
    return {
        file: TensorFileWriter(folder / file, [spec for part in parts for spec in specs_of(part[file])], metadata)
        for file in parts[0]
    }


def _write(writers: Mapping[str, TensorFileWriter], tensors: FileTensors) -> None:
    for file, words in tensors.items():
        for name, own in words.items():
            writers[file].write(name, own.values)
