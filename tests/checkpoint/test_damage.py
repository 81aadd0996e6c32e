"""Damaged checkpoints: every change is detected or harmless, and no code is executed."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.dense_state import load
from bagpipe.checkpoint.files import finish
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.errors import InputError
from tests.checkpoint.samples import (
    content,
    draw_rows,
    files_of,
    rows_of,
    save,
    three_checkpoints,
)
from tests.harness.disk import SmallDisk

CASES = 1000


def test_a_thousand_flips_and_cuts_are_noticed_or_harmless(tmp_path):
    folder, checkpoints, models = three_checkpoints(tmp_path)
    newest, model = checkpoints[-1], models[-1]
    dice = random.Random(9)
    targets = list(files_of(newest.folder))
    noticed = harmless = 0
    for number in range(CASES):
        # Every file in turn, since a few files hold most bytes.
        path = targets[number % len(targets)]
        intact = path.read_bytes()
        damaged = bytearray(intact)
        place = dice.randrange(len(intact))
        if number % 5 == 0:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        warnings: list[str] = []
        found = CheckpointFolder(tmp_path).newest(warnings.append)
        if found == newest:
            assert not warnings
            # Not a file of the checkpoint: a part is read only while its checkpoint is made.
            assert path.name.startswith("part-") or path.name == "manifest.json"
            harmless += 1
        else:
            assert found in checkpoints
            assert path.name in warnings[0]
            assert warnings[0].startswith("the checkpoint of step 30 is broken and skipped: ")
            noticed += 1
        path.write_bytes(intact)
    assert noticed + harmless == CASES
    assert noticed > CASES // 2
    assert content(rows_of(folder.newest(pytest.fail))) == model


@pytest.mark.parametrize(
    "name",
    [
        "dense-0000.safetensors",
        "rows-00000030-0001-000016.npy",
        "deleted-00000030-0000.npy",
        "dirty-0001.npy",
    ],
)
@pytest.mark.parametrize("other", [None, "dense-0001.safetensors", "rows-00000030-0000-000016.npy", "dirty-0000.npy"])
def test_missing_and_swapped_files_are_noticed(tmp_path, name, other):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    target = checkpoints[-1].folder / name
    target.unlink()
    if other is not None:
        shutil.copyfile(target.with_name(other), target)
    warnings: list[str] = []
    found = folder.newest(warnings.append)
    if name.startswith("dense") and other is not None and other.startswith("dense"):
        assert found == checkpoints[-1]  # replicas are equal
    else:
        assert found == checkpoints[1]
        assert name in warnings[0]


class _Hostile:
    """Creates a directory when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def hostile_files(marker: Path) -> list[bytes]:
    """A plain pickle, and an .npy file of pickled objects."""
    with tempfile.TemporaryFile() as file:
        np.save(file, np.array([_Hostile(marker)], object), allow_pickle=True)
        file.seek(0)
        return [pickle.dumps(_Hostile(marker)), file.read()]


def test_a_planted_pickle_does_not_run(tmp_path):
    """As any file of a checkpoint, also with a valid manifest: an attacker can write to the folder."""
    marker = tmp_path / "marker"
    folder, checkpoints, _ = three_checkpoints(tmp_path / "dir")
    newest = checkpoints[-1]
    pickle.loads(hostile_files(marker)[0])  # noqa: S301 - it does run where pickles are read
    marker.rmdir()
    for path in files_of(newest.folder):
        intact = path.read_bytes()
        for planted in hostile_files(marker):
            path.write_bytes(planted)
            assert folder.newest(lambda text: None) in checkpoints
            if path.suffix != ".json":
                with pytest.raises(BrokenCheckpoint):
                    _ = rows_of(newest) if path.suffix == ".npy" else load(newest.folder, finish(path))
            assert not marker.exists()
        path.write_bytes(intact)


def check_failing_save(path: Path, fail: Callable[[], AbstractContextManager[object]], said: str) -> None:
    """Assert that a save inside `fail` raises the system's error, keeps old files, and that the next one works."""
    folder, checkpoints, models = three_checkpoints(path)
    newest, model = checkpoints[-1], models[-1]
    changes = draw_rows(np.random.default_rng(1), 50)
    generation = folder.new_generation()
    with fail(), pytest.raises(OSError, match=said):
        save(folder, generation, 40, [changes], before=newest)
    again = CheckpointFolder(path)
    assert again.newest(pytest.fail) == newest
    assert content(rows_of(newest)) == model
    later = save(folder, generation, 40, [changes], before=newest)
    assert again.newest(pytest.fail) == later
    assert content(rows_of(later)) == model | changes


@contextmanager
def short_files(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 200, 1000, 3000])
def test_a_save_that_runs_into_a_limit_leaves_the_checkpoints_before(tmp_path, num_bytes):
    """The limit is hit in the dense file, a journal, a row file, a part or the manifest."""
    check_failing_save(tmp_path, lambda: short_files(num_bytes), "File too large")


@contextmanager
def filled(disk: SmallDisk) -> Iterator[None]:
    disk.fill()
    try:
        yield
    finally:
        disk.free()


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path):
    disk = SmallDisk(tmp_path, num_bytes=1 << 20)
    with ExitStack() as stack:
        try:
            stack.enter_context(disk)
        except InputError as error:
            pytest.skip(str(error))
        check_failing_save(tmp_path / "dir", lambda: filled(disk), "No space left on device")


def test_a_folder_with_only_damaged_checkpoints_is_refused(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    for checkpoint in checkpoints:
        (checkpoint.folder / "manifest.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="none of its 3 checkpoints is whole"):
        folder.newest(lambda text: None)
