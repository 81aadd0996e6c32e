"""`apply_delta`: base + delta = full export, byte for byte.

base, mapped ──unchanged rows──────────┐
delta ──changed, deleted rows, dense───┴──tensor by tensor──> files, whose checksums are those of the full export
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.serving.delta import DELTA_FILE, Delta, deleted_key, key_of, read_delta, rows_key
from bagpipe.serving.export_folder import file_writers
from bagpipe.serving.manifest import (
    MANIFEST,
    MODEL_FILE,
    PROGRAM_FILE,
    ExportManifest,
    TableFiles,
    file_checksum,
    read_manifest,
)
from bagpipe.serving.table_tensors import Words
from bagpipe.serving.tensor_file import WORDS, TensorFile
from bagpipe.util.outputs import new_folder

__all__ = ["apply_delta"]


def apply_delta(base: Path, delta: Path, out: Path) -> ExportManifest:
    """Write the full export that a delta leads to. One tensor is in memory at a time.

    Args:
        base: folder of the export that the delta was made from.
        delta: folder of the delta.
        out: new folder.

    Returns:
        Its manifest.

    Raises:
        InputError: the base is another export, a folder is not whole or damaged, or `out` cannot be written.
    """
    found = read_delta(delta)
    manifest, earlier = found.manifest, read_manifest(base)
    _check_base(base, earlier, found)
    old = {name: TensorFile(base / name) for name, file in earlier.files.items() if file.tensors}
    changes = TensorFile(delta / DELTA_FILE)
    if changes.specs.keys() != found.file.tensors.keys():
        raise InputError(f"{delta / DELTA_FILE}: has other tensors than {delta} says")
    with new_folder(out, "OUT") as folder:
        _write_files(folder, found, old, changes)
        if manifest.program:
            shutil.copyfile(delta / PROGRAM_FILE, folder / PROGRAM_FILE)
            if file_checksum(folder / PROGRAM_FILE) != manifest.files[PROGRAM_FILE].sha256:
                raise InputError(f"{delta / PROGRAM_FILE} does not match its checksum")
        (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


def _check_base(base: Path, earlier: ExportManifest, delta: Delta) -> None:
    """Raise InputError unless the base's manifest has the tensors that the delta was made from."""
    for by_file in delta.base_tensors.values():
        for file, tensors in by_file.items():
            theirs = earlier.files[file].tensors if file in earlier.files else {}
            for name, checksum in tensors.items():
                if theirs.get(name) != checksum:
                    raise InputError(
                        f"{base} is not the base of this delta: {name!r} has checksum {theirs.get(name, 'none')[:12]} "
                        f"(step {earlier.step}), expected {checksum[:12]} (step {delta.base_step})"
                    )


def _write_files(folder: Path, delta: Delta, old: Mapping[str, TensorFile], changes: TensorFile) -> None:
    """Write every tensor file. Raises InputError if a tensor does not become what the full export has."""
    manifest = delta.manifest
    owners = {
        (file, name): table
        for table, by_file in delta.base_tensors.items()
        for file, tensors in by_file.items()
        for name in tensors
    }
    merges = {table.name: _Merge.of(table, old, changes) for table in manifest.tables}
    targets = {name: file for name, file in manifest.files.items() if file.tensors}
    parts = {
        file: {name: _layout(file, name, owners, merges, old, changes) for name in target.tensors}
        for file, target in targets.items()
    }
    with ExitStack() as stack:
        for file, writer in file_writers(folder, manifest, [parts]).items():
            stack.enter_context(writer)
            for name, expected in targets[file].tensors.items():
                owner = owners.get((file, name))
                change = changes.words(key_of(file, name)) if key_of(file, name) in changes.specs else None
                if owner is None:
                    assert change is not None, "a dense tensor is whole"
                    words = change
                else:
                    words = merges[owner].words(old[file].words(name), change)
                writer.write(name, words)
                if writer.checksums[name] != expected:
                    raise InputError(
                        f"{name!r} has checksum {writer.checksums[name][:12]} after the change, expected "
                        f"{expected[:12]}: a file of the base or of the delta is damaged"
                    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Merge:
    """The change of a table's rows.

    Attributes:
        count: rows after it.
        kept: positions of the base's rows among them, but for deleted rows; None: their own, there are no ids.
        alive: bool ``[rows of the base]``, those that are not deleted; None: all.
        changed: positions of the delta's rows.
        ids: of the rows after it; None: position i is id i.
    """

    count: int
    kept: NDArray[np.int64] | None
    alive: NDArray[np.bool_] | None
    changed: NDArray[np.int64]
    ids: NDArray[np.int64] | None

    @classmethod
    def of(cls, table: TableFiles, old: Mapping[str, TensorFile], changes: TensorFile) -> _Merge:
        changed = changes.words(rows_key(table.name))
        if table.ids is None:
            count = old[MODEL_FILE].specs[table.weight].shape[0]
            return cls(count=count, kept=None, alive=None, changed=changed, ids=None)
        before, alive = old[MODEL_FILE].words(table.ids), None
        if deleted_key(table.name) in changes.specs:
            alive = np.isin(before, changes.words(deleted_key(table.name)), invert=True)
            before = before[alive]
        ids = np.union1d(before, changed)
        kept, places = np.searchsorted(ids, before), np.searchsorted(ids, changed)
        return cls(count=len(ids), kept=kept, alive=alive, changed=places, ids=ids)

    def words(self, before: NDArray[Any], change: NDArray[Any] | None) -> NDArray[Any]:
        """The words of a tensor after it; `change` None: the tensor of ids."""
        if change is None:
            assert self.ids is not None, "only ids have no change of their own"
            return self.ids
        after = np.empty((self.count, *before.shape[1:]), before.dtype)
        after[slice(None) if self.kept is None else self.kept] = before if self.alive is None else before[self.alive]
        after[self.changed] = change
        return after


def _layout(
    file: str,
    name: str,
    owners: Mapping[tuple[str, str], str],
    merges: Mapping[str, _Merge],
    old: Mapping[str, TensorFile],
    changes: TensorFile,
) -> Words:
    """A tensor after the change, without values."""
    owner = owners.get((file, name))
    spec = changes.specs[key_of(file, name)] if owner is None else old[file].specs[name]
    shape = spec.shape if owner is None else (merges[owner].count, *spec.shape[1:])
    return Words(dtype=spec.dtype, values=np.broadcast_to(np.zeros((), WORDS[spec.dtype]), shape))
