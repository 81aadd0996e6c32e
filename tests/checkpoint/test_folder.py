from __future__ import annotations

import dataclasses
import os
import threading

import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import FORMAT_VERSION
from bagpipe.errors import InputError
from tests.checkpoint.samples import content, files_of, manifest_of, rows_of, save, three_checkpoints
from tests.checkpoint.test_codec import changed


def no_warnings(text: str) -> None:
    raise AssertionError(text)


def steps_of(folder: CheckpointFolder) -> list[tuple[int, int]]:
    return list(folder.positions())


def test_two_starts_at_once_get_two_generations(tmp_path):
    numbers = []
    threads = [
        threading.Thread(target=lambda: numbers.append(CheckpointFolder(tmp_path / "new").new_generation()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"checkpoint\.dir .*/file/x cannot be written: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "x").new_generation()
    with pytest.raises(InputError, match="cannot be read: Not a directory"):
        CheckpointFolder(tmp_path / "file").positions()
    assert CheckpointFolder(tmp_path / "none").newest(no_warnings) is None


def test_every_checkpoint_reads_back(tmp_path):
    _, checkpoints, models = three_checkpoints(tmp_path)
    folder = CheckpointFolder(tmp_path)
    newest = folder.newest(no_warnings)
    assert newest == checkpoints[-1]
    assert content(rows_of(newest)) == models[-1]
    for step, checkpoint, model in zip((10, 20, 30), checkpoints, models, strict=True):
        assert folder.at(step, no_warnings) == checkpoint
        assert content(rows_of(checkpoint)) == model
    with pytest.raises(InputError, match="no whole checkpoint of step 15, it has steps 10, 20, 30"):
        folder.at(15, no_warnings)


def test_a_later_generation_is_newer_whatever_its_step(tmp_path):
    folder, checkpoints, models = three_checkpoints(tmp_path)
    again = save(folder, folder.new_generation(), 25, [{(0, 1): 5.0}], before=checkpoints[1])
    assert again.manifest.generation == 2
    assert folder.newest(no_warnings) == again
    assert content(rows_of(again)) == models[1] | {(0, 1): 5.0}


def test_an_older_checkpoint_can_become_the_newest(tmp_path):
    """It is linked to the same files; its source can be deleted."""
    folder, checkpoints, models = three_checkpoints(tmp_path)
    assert [folder.has_newer(each) for each in checkpoints] == [True, True, False]
    adopted = folder.adopt(checkpoints[1], folder.new_generation())
    assert (adopted.position, adopted.manifest.parent_checkpoint_id) == ((2, 20), "")
    assert CheckpointFolder(tmp_path).newest(no_warnings) == adopted
    name = adopted.manifest.files[0].name
    assert (adopted.folder / name).samefile(checkpoints[1].folder / name)
    folder.prune(1, adopted)
    assert steps_of(folder) == [(2, 20)]
    assert content(rows_of(folder.at(20, no_warnings))) == models[1]


def test_a_checkpoint_without_manifest_is_ignored(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    (checkpoints[-1].folder / "manifest.json").rename(checkpoints[-1].folder / "manifest.json.tmp")
    assert folder.newest(no_warnings) == checkpoints[1]


def test_an_interrupted_save_is_saved_again(tmp_path):
    """In the same generation, and by the next start. Leftovers are harmless, and the next start removes them."""
    folder, checkpoints, models = three_checkpoints(tmp_path)
    for generation in (1, folder.new_generation()):
        left = folder.step_folder(generation, 40)
        for name in ("manifest.json.tmp", "dense-0000.safetensors", "rows-00000040-0000-000016.npy", "part-0000.json"):
            (left / name).write_bytes(b"half of it")
        (folder.generation_folder(generation) / "journal-000001-0000-000016").write_bytes(b"rows")
        assert folder.newest(no_warnings) == checkpoints[-1]
        again = save(folder, generation, 40, [{(0, 7): 3.0}, {(0, 8): 4.0}], before=checkpoints[-1])
        assert folder.newest(no_warnings) == again
        assert content(rows_of(again)) == models[-1] | {(0, 7): 3.0, (0, 8): 4.0}
        if generation == 1:
            (again.folder / "manifest.json").unlink()
    folder.prune(10, again)
    names = {str(path.relative_to(tmp_path)) for path in files_of(tmp_path) if path.parent.name != "full"}
    assert not [
        name for name in names if "generation-000001" in name and ("step-00000040" in name or "journal" in name)
    ]


def test_parts_are_awaited(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    parts = checkpoints[0].manifest.parts
    folder.write_part(1, 50, parts[1])
    assert folder.read_parts(1, 50, 2) is None
    folder.write_part(1, 50, parts[0])
    assert folder.read_parts(1, 50, 2) == parts


def test_a_checkpoint_with_missing_parts_is_not_published(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    base = checkpoints[0].manifest.row_files
    with pytest.raises(FileNotFoundError, match="is gone"):
        folder.publish(manifest_of(1, 40, base=base))
    # A file that was truncated after it was written.
    manifest = dataclasses.replace(checkpoints[0].manifest, step=50)
    for entry in manifest.files:
        (folder.step_folder(1, 50) / entry.name).write_bytes(b"\0" * entry.num_bytes)
    os.truncate(folder.step_folder(1, 50) / manifest.files[0].name, 1)
    with pytest.raises(OSError, match="another length"):
        folder.publish(manifest)
    assert steps_of(folder) == [(1, 30), (1, 20), (1, 10)]


def test_a_newer_format_is_refused_not_skipped(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    newest = checkpoints[-1]
    (newest.folder / "manifest.json").write_bytes(changed(newest.manifest, "format_version", to=FORMAT_VERSION + 1))
    with pytest.raises(InputError, match=f"format version {FORMAT_VERSION + 1}"):
        folder.newest(no_warnings)


def test_a_manifest_of_another_step_is_broken(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    stale = (checkpoints[0].folder / "manifest.json").read_bytes()
    (checkpoints[-1].folder / "manifest.json").write_bytes(stale)
    warnings = []
    assert folder.newest(warnings.append) == checkpoints[1]
    assert "that of generation 1, step 10" in warnings[0]


def test_an_error_says_that_all_are_broken(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    for checkpoint in checkpoints:
        (checkpoint.folder / "dense-0000.safetensors").unlink()
    warnings = []
    with pytest.raises(InputError, match="none of its 3 checkpoints is whole"):
        folder.newest(warnings.append)
    assert len(warnings) == 3
    assert all("dense-0000.safetensors: cannot be read" in text for text in warnings)
    with pytest.raises(InputError, match="it has steps none"):
        folder.at(30, warnings.append)


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [30, 20]), (3, [30, 20, 10]), (9, [30, 20, 10])])
def test_the_newest_are_kept(tmp_path, keep, left):
    folder, checkpoints, models = three_checkpoints(tmp_path)
    folder.prune(keep, checkpoints[-1])
    assert steps_of(folder) == [(1, step) for step in left]
    assert content(rows_of(folder.at(30, no_warnings))) == models[-1]
    with pytest.raises(ValueError, match="at least 1"):
        folder.prune(0, checkpoints[-1])


def test_broken_checkpoints_are_not_counted_as_kept(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    (checkpoints[2].folder / "dense-0000.safetensors").unlink()
    warnings = []
    start = folder.newest(warnings.append)
    assert start == checkpoints[1]
    again = save(folder, folder.new_generation(), 30, [{}, {}], before=start)
    folder.prune(2, again)
    assert steps_of(folder) == [(2, 30), (1, 30), (1, 20)]


def test_pruning_removes_only_older_checkpoints(tmp_path):
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    folder.prune(1, checkpoints[1])
    assert steps_of(folder) == [(1, 30), (1, 20)]


def test_the_checkpoint_of_a_later_start_is_kept(tmp_path):
    """The replaced job still makes checkpoints. The start's checkpoint goes once the later job has its own."""
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    generation = folder.new_generation()
    folder.note_start(generation, "2-token", checkpoints[0])
    folder.note_start(folder.new_generation(), "3-token", None)
    (folder.generation_folder(folder.new_generation()) / "start").write_bytes(b"\xff 1 x")
    folder.prune(1, checkpoints[-1])
    assert steps_of(folder) == [(1, 30), (1, 10)]
    assert folder.token_of(generation) == "2-token"
    assert folder.token_of(9) == ""
    again = save(folder, generation, 20, [{}], before=checkpoints[0])
    folder.prune(1, again)
    assert steps_of(folder) == [(2, 20)]


def test_an_empty_generation_is_swept(tmp_path):
    folder, _, _ = three_checkpoints(tmp_path)
    folder.new_generation()
    latest = save(folder, folder.new_generation(), 40, [{}])
    folder.prune(1, latest)
    assert [path.name for path in tmp_path.iterdir() if "generation" in path.name] == ["generation-000003"]
    assert CheckpointFolder(tmp_path).new_generation() == 4


@pytest.mark.parametrize("name", ["generation-000002", "generation-000001/step-00000040"])
def test_a_link_to_another_folder_is_refused_before_anything_is_removed(tmp_path, name):
    elsewhere, _, models = three_checkpoints(tmp_path / "elsewhere")
    folder, checkpoints, _ = three_checkpoints(tmp_path / "job")
    target = tmp_path / "elsewhere" / "generation-000001"
    (tmp_path / "job" / name).symlink_to(target if name.startswith("generation-000002") else target / "step-00000010")
    before = sorted(path for path in tmp_path.rglob("*"))
    for call in (lambda: folder.newest(no_warnings), lambda: folder.prune(1, checkpoints[-1])):
        with pytest.raises(InputError, match=rf"expected a folder, got a symbolic link: .*{name}$"):
            call()
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert content(rows_of(elsewhere.newest(no_warnings))) == models[-1]


def test_a_step_is_not_written_through_a_link(tmp_path):
    folder, _, _ = three_checkpoints(tmp_path / "job")
    (tmp_path / "elsewhere").mkdir()
    (folder.generation_folder(1) / "step-00000050").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="expected a folder, got a symbolic link"):
        folder.step_folder(1, 50)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_pipe_in_place_of_a_file_is_a_broken_checkpoint(tmp_path):
    folder, checkpoints, models = three_checkpoints(tmp_path)
    for path in (checkpoints[-1].folder / "manifest.json", tmp_path / "generation-000001" / "start"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    warnings = []
    newest = folder.newest(warnings.append)
    assert newest == checkpoints[-2]
    assert content(rows_of(newest)) == models[-2]
    assert "manifest.json: cannot be read: expected a file, got something else" in warnings[0]
    assert folder.token_of(1) == ""
