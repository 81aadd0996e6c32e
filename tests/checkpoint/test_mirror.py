from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bagpipe.checkpoint.best import Best, read_best, write_best
from bagpipe.checkpoint.codec import encode
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.mirror import CheckpointMirror, MirrorThread
from bagpipe.errors import InputError, JobError
from bagpipe.files.transfer import files_below, get_bytes, put_bytes, remove
from tests.checkpoint.samples import LINEAGE, content, files_of, rows_of, three_checkpoints
from tests.pipeline.small_loop import until

URL = "memory://mirrors/a"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield
    system.store.clear()


def no_warnings(text: str) -> None:
    raise AssertionError(text)


def test_the_mirror_has_the_files_of_the_folder(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    assert mirror.positions() == ((1, 30), (1, 20), (1, 10))
    step = checkpoints[-1].folder
    names = {entry.name for entry in checkpoints[-1].manifest.files} | {"manifest.json"}
    assert set(files_below(f"{URL}/generation-000001/step-00000030")) == names
    for name in names:
        assert (
            fsspec.filesystem("memory").cat_file(f"/mirrors/a/generation-000001/step-00000030/{name}")
            == (step / name).read_bytes()
        )


def test_files_of_the_checkpoint_before_are_copied_within_the_store(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    mirror.upload(checkpoints[0])
    shared = {*checkpoints[1].manifest.files} & {*checkpoints[0].manifest.files}
    assert shared
    for entry in shared:
        (checkpoints[1].folder / entry.name).unlink()  # not needed, unless the mirror has lost it
    mirror.upload(checkpoints[1])
    remove(f"{URL}/generation-000001/step-00000020/{next(iter(shared)).name}")
    with pytest.raises(FileNotFoundError):
        mirror.upload(
            dataclasses.replace(checkpoints[1], manifest=dataclasses.replace(checkpoints[1].manifest, step=25))
        )


def test_a_folder_without_checkpoints_takes_the_newest(tmp_path: Path) -> None:
    _, checkpoints, models = three_checkpoints(tmp_path / "here")
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    told: list[str] = []
    folder = CheckpointFolder(tmp_path / "there")
    CheckpointMirror(URL).restore(folder, "auto", told.append)
    found = folder.newest(no_warnings)
    assert found is not None
    assert content(rows_of(found)) == models[-1]
    assert told == [f"checkpoint.dir has no checkpoint: took the one at step 30 from {URL}"]
    assert folder.new_generation() == 2


def test_a_folder_can_take_a_step(tmp_path: Path) -> None:
    _, checkpoints, models = three_checkpoints(tmp_path / "here")
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    folder = CheckpointFolder(tmp_path / "there")
    mirror.restore(folder, "20", lambda line: None)
    assert content(rows_of(folder.at(20, no_warnings))) == models[1]
    none = CheckpointFolder(tmp_path / "none")
    mirror.restore(none, "25", no_warnings)
    assert none.positions() == ()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path / "here")
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    entry = checkpoints[-1].manifest.files[0]
    put_bytes(bytes(entry.num_bytes), f"{URL}/generation-000001/step-00000030/{entry.name}")
    told: list[str] = []
    folder = CheckpointFolder(tmp_path / "there")
    mirror.restore(folder, "auto", told.append)
    assert told[0].startswith("checkpoint.mirror: skipping the checkpoint at step 30: ")
    assert folder.positions() == ((1, 20),)
    for step in (10, 20):
        remove(f"{URL}/generation-000001/step-000000{step}/{checkpoints[0].manifest.files[0].name}")
    with pytest.raises(InputError, match="none of its 3 checkpoints is whole"):
        mirror.restore(CheckpointFolder(tmp_path / "other"), "auto", told.append)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    put_bytes(b"left", f"{URL}/generation-000001/step-00000005/rows.npy")
    mirror.prune(2, (1, 30), folder.path)
    assert mirror.positions() == ((1, 30), (1, 20))
    assert not files_below(f"{URL}/generation-000001/step-00000005")
    assert not files_below(f"{URL}/generation-000001/step-00000010")
    write_best(folder.path, Best(generation=1, step=20, metric="auc", value=0.5))
    mirror.prune(1, (1, 30), folder.path)
    assert mirror.positions() == ((1, 30), (1, 20))


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    mirror.check_lineage(LINEAGE, 0)
    mirror.upload(checkpoints[0])
    mirror.check_lineage(LINEAGE, 1)
    with pytest.raises(InputError, match="holds checkpoints of another job: name another mirror"):
        mirror.check_lineage("f" * 32, 1)
    with pytest.raises(InputError, match=r"holds a checkpoint of start 1 \(step 10\), checkpoint.dir had 0 starts"):
        mirror.check_lineage(LINEAGE, 0)


def test_a_damaged_manifest_does_not_hide_whose_checkpoints_these_are(tmp_path: Path) -> None:
    _, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    put_bytes(b"damaged", f"{URL}/generation-000001/step-00000030/manifest.json")
    mirror.check_lineage(LINEAGE, 1)
    with pytest.raises(InputError, match="holds checkpoints of another job"):
        mirror.check_lineage("f" * 32, 1)


def test_a_checkpoint_with_another_manifest_is_uploaded_anew(tmp_path: Path) -> None:
    _, checkpoints, models = three_checkpoints(tmp_path / "here")
    newest = checkpoints[-1]
    manifest = f"{URL}/generation-000001/step-00000030/manifest.json"
    other = dataclasses.replace(newest.manifest, lineage="f" * 32)
    for content_there in (b"damaged", encode(other)):
        put_bytes(content_there, manifest)
        CheckpointMirror(URL).upload(newest)
        assert get_bytes(manifest) == encode(newest.manifest)
    folder = CheckpointFolder(tmp_path / "there")
    CheckpointMirror(URL).restore(folder, "auto", lambda line: None)
    assert content(rows_of(folder.at(30, no_warnings))) == models[-1]
    remove(f"{URL}/generation-000001/step-00000030/{newest.manifest.files[0].name}")
    CheckpointMirror(URL).upload(newest)  # it is there: nothing is uploaded
    assert newest.manifest.files[0].name not in files_below(f"{URL}/generation-000001/step-00000030")


def test_the_best_goes_to_another_machine_and_stays(tmp_path: Path) -> None:
    folder, checkpoints, models = three_checkpoints(tmp_path / "here")
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    best = Best(generation=1, step=10, metric="auc", value=0.5)
    write_best(folder.path, best)
    mirror.prune(1, (1, 30), folder.path)
    there = CheckpointFolder(tmp_path / "there")
    other = CheckpointMirror(URL)
    other.restore(there, "auto", lambda line: None)
    assert read_best(there.path) == best
    assert content(rows_of(there.best(no_warnings))) == models[0]
    found = there.newest(no_warnings)
    assert found is not None
    assert found.position == (1, 30)
    there.prune(1, found)
    other.upload(found)
    other.prune(1, (1, 30), there.path)
    assert there.positions() == other.positions() == ((1, 30), (1, 10))
    alone = CheckpointFolder(tmp_path / "alone")
    CheckpointMirror(URL).restore(alone, "best", lambda line: None)
    assert alone.positions() == ((1, 10),)
    assert alone.best(no_warnings).position == (1, 10)


def test_the_best_stays_until_a_better_one_is_mirrored(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    mirror = CheckpointMirror(URL)
    mirror.upload(checkpoints[0])
    write_best(folder.path, Best(generation=1, step=10, metric="auc", value=0.5))
    mirror.prune(1, (1, 10), folder.path)
    write_best(folder.path, Best(generation=1, step=20, metric="auc", value=0.6))  # left out
    again = CheckpointMirror(URL)
    again.upload(checkpoints[2])
    again.prune(1, (1, 30), folder.path)
    assert again.positions() == ((1, 30), (1, 10))


def test_a_broken_best_is_left_out(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path / "here")
    mirror = CheckpointMirror(URL)
    for checkpoint in checkpoints:
        mirror.upload(checkpoint)
    write_best(folder.path, Best(generation=1, step=10, metric="auc", value=0.5))
    mirror.name_best(folder.path)
    remove(f"{URL}/generation-000001/step-00000010/{checkpoints[0].manifest.files[0].name}")
    told: list[str] = []
    there = CheckpointFolder(tmp_path / "there")
    CheckpointMirror(URL).restore(there, "auto", told.append)
    assert told[0].startswith("checkpoint.mirror: skipping the best checkpoint, at step 10: ")
    assert read_best(there.path) is None
    assert there.positions() == ((1, 30),)
    put_bytes(b"damaged", f"{URL}/best.json")
    other = CheckpointFolder(tmp_path / "other")
    CheckpointMirror(URL).restore(other, "auto", lambda line: None)
    assert other.positions() == ((1, 30),)


def test_an_evaluation_behind_the_last_upload_counts(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    with MirrorThread(CheckpointMirror(URL), keep=1, folder=folder.path) as thread:
        thread.offer(checkpoints[-1])
        until(lambda: not thread.held())
        write_best(folder.path, Best(generation=1, step=30, metric="auc", value=0.5))
    there = CheckpointFolder(tmp_path / "there")
    CheckpointMirror(URL).restore(there, "best", lambda line: None)
    assert there.best(no_warnings).position == (1, 30)


def test_a_thread_uploads_what_is_offered(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    with MirrorThread(CheckpointMirror(URL), keep=2, folder=folder.path) as thread:
        for checkpoint in checkpoints:
            thread.offer(checkpoint)
            assert checkpoint.position in thread.held() or CheckpointMirror(URL).positions()
    assert CheckpointMirror(URL).positions()[0] == (1, 30)
    assert thread.held() == frozenset()


def test_a_failed_upload_is_a_warning_and_at_the_end_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    broken = dataclasses.replace(checkpoints[-1], folder=tmp_path / "gone")
    words = (
        f"the checkpoint at step 30 is whole in checkpoint.dir, and could not be copied to checkpoint.mirror {URL}: "
    )
    with (
        pytest.raises(JobError, match=words),
        MirrorThread(CheckpointMirror(URL), keep=2, folder=folder.path) as thread,
    ):
        thread.offer(broken)
    assert words in caplog.text
    assert CheckpointMirror(URL).positions() == ()


def test_a_failed_job_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), MirrorThread(CheckpointMirror(URL), keep=1, folder=tmp_path):
        raise ZeroDivisionError


def test_files_stay_as_they_are(tmp_path: Path) -> None:
    folder, checkpoints, _ = three_checkpoints(tmp_path)
    before = [path.read_bytes() for path in files_of(folder.path)]
    CheckpointMirror(URL).upload(checkpoints[-1])
    assert [path.read_bytes() for path in files_of(folder.path)] == before
