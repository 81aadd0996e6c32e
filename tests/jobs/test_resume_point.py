"""The checkpoint that a job starts from. Whole jobs: `tests.system.test_resume`."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import Manifest
from bagpipe.checkpoint.mirror import CheckpointMirror
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import InputError
from bagpipe.jobs.job_facts import JobFacts
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.resume_point import ResumePoint, start_generation
from bagpipe.start_from.first_checkpoint import FirstCheckpoint
from bagpipe.store.fencing.fence import Ledger
from bagpipe.store.memory.store import MemoryStore
from tests.jobs.facts import FACTS, ROWS, SETTINGS, identity_with


class Rank(Ranks):
    """A fake rank: rank 0 records what it shares, the others receive given values."""

    def __init__(self, rank: int = 0, said: Any = None) -> None:
        super().__init__()
        self.rank = rank
        self.said = said

    def share(self, value: Any) -> Any:
        self.said = value if self.rank == 0 else self.said
        return self.said


def start(folder: Path, rank: Ranks, store: MemoryStore, facts: JobFacts = FACTS, **checkpoint: Any) -> ResumePoint:
    return start_generation(
        CheckpointConfig(dir=str(folder), **checkpoint), StoreConfig(namespace="n"), rank, facts, store
    )


def test_a_first_start_has_an_empty_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = start(tmp_path, Rank(), store)
        assert (first.generation, first.first_batch, first.parts) == (1, 0, ())
        second = start(tmp_path, Rank(), store)
        assert (second.generation, second.checkpoint_id, second.first_batch) == (2, first.checkpoint_id, 0)
        assert second.token != first.token
        anew = start(tmp_path, Rank(), store, resume="never")
        assert anew.generation == 3
        assert anew.checkpoint_id.partition(":")[0] != first.checkpoint_id.partition(":")[0]


def test_a_restarted_job_continues_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryStore(ROWS) as store:
        start(tmp_path, Rank(), store)
        first = start(tmp_path, Rank(), store, resume="never")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert start(tmp_path, Rank(), store, resume="never").checkpoint_id == first.checkpoint_id


def test_a_job_resumed_from_an_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is restarted twice by the same command before it makes a checkpoint of its own."""
    with MemoryStore(ROWS) as store:
        first = start(tmp_path, Rank(), store)
        assert first.folder is not None
        assert first.checkpoint is not None
        first.folder.step_folder(1, 8)
        later = first.folder.publish(dataclasses.replace(first.checkpoint.manifest, step=8))
        back = start(tmp_path, Rank(), store, resume="0")
        assert back.first_batch == 0
        for resume in ("0", "auto"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            again = start(tmp_path, Rank(), store, resume=resume)
            assert again.checkpoint_id == back.checkpoint_id
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
        assert start(tmp_path, Rank(), store, resume="8").first_batch == later.manifest.step


def test_a_job_without_checkpoints_resumes_from_its_mirror(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mirror = f"memory://{tmp_path.name}"
    with MemoryStore(ROWS) as store:
        first = start(tmp_path / "here", Rank(), store, mirror=mirror)
        assert first.checkpoint is not None
        CheckpointMirror(mirror).upload(first.checkpoint)
        later = start(tmp_path / "there", Rank(), store, mirror=mirror)
        assert (later.generation, later.lineage) == (2, first.lineage)
        assert f"took the one at step 0 from {mirror}" in capsys.readouterr().err
        with pytest.raises(InputError, match="holds checkpoints of another job"):
            start(tmp_path / "other", Rank(), store, mirror=mirror, resume="never")
        assert not (tmp_path / "other").exists()


class Busy(MemoryStore):
    """A store that is in use by another job."""

    work: Callable[[], None]

    def ledger(self) -> Ledger:
        self.work()
        return super().ledger()


def test_a_checkpoint_removed_while_chosen_is_not_used(tmp_path: Path) -> None:
    """A running job removes the checkpoint. Once the start is recorded, the job keeps that checkpoint."""
    with MemoryStore(ROWS) as store:
        first = start(tmp_path, Rank(), store)
    assert first.checkpoint is not None
    manifest = first.checkpoint.manifest
    running = CheckpointFolder(tmp_path)

    def publish(step: int) -> None:
        running.step_folder(1, step)
        running.prune(1, running.publish(dataclasses.replace(manifest, step=step)))

    with Busy(ROWS) as store:
        store.work = lambda: publish(8)
        second = start(tmp_path, Rank(), store)
    assert second.first_batch == 8
    publish(16)
    assert running.positions() == ((1, 16), (1, 8))


def test_all_ranks_start_from_the_same_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = Rank()
        resume_point = start(tmp_path, first, store)
        assert start(tmp_path, Rank(1, first.said), store) == resume_point


def test_ranks_need_one_folder(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = Rank()
        start(tmp_path / "of-0", first, store)
        start(tmp_path / "of-1", Rank(), store)
        for folder in ("of-1", "of-2"):
            with pytest.raises(
                InputError, match=f"{folder} on host {socket.gethostname()} is not the folder that rank 0"
            ):
                start(tmp_path / folder, Rank(1, first.said), store)


def test_without_a_folder_there_is_no_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        resume_point = start_generation(CheckpointConfig(), StoreConfig(), Rank(), FACTS, store)
        assert (resume_point.checkpoint_id, resume_point.first_batch, resume_point.generation) == ("", 0, 0)
        assert resume_point.token.startswith("0-")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {**SETTINGS, "optim.dense": "adam"}}, "optim.dense 'adagrad', this"),
        ({"settings": {**SETTINGS, "run.dtype": "float64"}}, "run.dtype 'float32', this"),
        ({"rows": dataclasses.replace(ROWS, seed=7)}, "rows.seed 0, this job has 7"),
        (
            {"identity": identity_with(num_bytes=99)},
            "other data: /data/day has 99 bytes, not 100: use another",
        ),
        (
            {"identity": identity_with(sampled=("b",))},
            "other data: /data/day has other content: the block at byte 0",
        ),
    ],
)
def test_another_jobs_checkpoint_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        start(tmp_path, Rank(), store)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError, match=f"the checkpoint at step 0 was made with {words}"):
            start(tmp_path, Rank(), store, dataclasses.replace(FACTS, **change))
        assert sorted(tmp_path.rglob("*")) == before


class _Refused:
    """Other weights that turn out not to fit while they are written."""

    def compare(self) -> None:
        """They seem to fit."""

    def write(self, folder: Path, manifest: Manifest) -> Manifest:
        (folder / "full-00000000-000032.npy").touch()
        raise InputError("row 3 has a weight beyond the largest of float16")


def test_weights_that_are_refused_while_they_are_written_leave_nothing(tmp_path: Path) -> None:
    origin = cast(FirstCheckpoint, _Refused())
    with MemoryStore(ROWS) as store:
        for resume in ("auto", "never"):
            config = CheckpointConfig(dir=str(tmp_path), start_from="there", resume=resume)
            with pytest.raises(InputError, match="beyond the largest"):
                start_generation(config, StoreConfig(namespace="n"), Rank(), FACTS, store, origin)
            assert not [*tmp_path.iterdir()]
        assert start(tmp_path, Rank(), store).generation == 1
