"""The checkpoint that a job starts from. Whole jobs: `tests.system.test_resume`."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import FileEntry, Manifest, Part
from bagpipe.config.sections import CheckpointConfig, Config, DataConfig, OptimConfig, RunConfig, StoreConfig
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import Ledger
from bagpipe.store.memory.store import MemoryStore
from bagpipe.types.batch_identity import BatchIdentity, FileIdentity
from bagpipe.types.schema import DataSchema, Feature, RowSchema, RowTable, Table
from trainer.ranks import Ranks
from trainer.resume_point import JobFacts, compare, result_settings, start_generation

ROWS = RowSchema(tables=(RowTable(name="goods", dim=4),), optimizer="adagrad")
DATA = DataSchema(
    label="label", dense=(), features=(Feature(name="item", table="goods"),), tables=(Table(name="goods"),)
)
FILE = FileIdentity(name="/data/day", num_bytes=100, sampled=("a",))
IDENTITY = BatchIdentity(code="c", layout="lines", files=(FILE,))
FACTS = JobFacts(settings=result_settings(Config(), DATA), rows=ROWS, identity=IDENTITY, world_size=1)


def identity_with(**changes: Any) -> BatchIdentity:
    """The identity of data whose only file has changed."""
    return dataclasses.replace(IDENTITY, files=(dataclasses.replace(FILE, **changes),))


class Rank(Ranks):
    """A fake rank: rank 0 records what it shares, the others receive given values."""

    def __init__(self, rank: int = 0, said: Any = None) -> None:
        super().__init__()
        self.rank = rank
        self.said = said

    def share(self, value: Any) -> Any:
        self.said = value if self.rank == 0 else self.said
        return self.said


def config_of(folder: Path, **checkpoint: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(dir=str(folder), **checkpoint), store=StoreConfig(namespace="n"))


def test_a_first_start_has_an_empty_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = start_generation(config_of(tmp_path), Rank(), FACTS, store)
        assert (first.generation, first.first_batch, first.parts) == (1, 0, ())
        second = start_generation(config_of(tmp_path), Rank(), FACTS, store)
        assert (second.generation, second.checkpoint_id, second.first_batch) == (2, first.checkpoint_id, 0)
        assert second.token != first.token
        anew = start_generation(config_of(tmp_path, resume="never"), Rank(), FACTS, store)
        assert anew.generation == 3
        assert anew.checkpoint_id.partition(":")[0] != first.checkpoint_id.partition(":")[0]


def test_a_restarted_job_continues_its_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryStore(ROWS) as store:
        start_generation(config_of(tmp_path), Rank(), FACTS, store)
        first = start_generation(config_of(tmp_path, resume="never"), Rank(), FACTS, store)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert (
            start_generation(config_of(tmp_path, resume="never"), Rank(), FACTS, store).checkpoint_id
            == first.checkpoint_id
        )


def test_a_job_resumed_from_an_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is restarted twice by the same command before it makes a checkpoint of its own."""
    with MemoryStore(ROWS) as store:
        first = start_generation(config_of(tmp_path), Rank(), FACTS, store)
        assert first.folder is not None
        assert first.checkpoint is not None
        first.folder.step_folder(1, 8)
        later = first.folder.publish(dataclasses.replace(first.checkpoint.manifest, step=8))
        back = start_generation(config_of(tmp_path, resume="0"), Rank(), FACTS, store)
        assert back.first_batch == 0
        for resume in ("0", "auto"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            again = start_generation(config_of(tmp_path, resume=resume), Rank(), FACTS, store)
            assert again.checkpoint_id == back.checkpoint_id
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
        assert (
            start_generation(config_of(tmp_path, resume="8"), Rank(), FACTS, store).first_batch == later.manifest.step
        )


class Busy(MemoryStore):
    """A store that is in use by another job."""

    work: Callable[[], None]

    def ledger(self) -> Ledger:
        self.work()
        return super().ledger()


def test_a_checkpoint_removed_while_chosen_is_not_used(tmp_path: Path) -> None:
    """A running job removes the checkpoint. Once the start is recorded, the job keeps that checkpoint."""
    with MemoryStore(ROWS) as store:
        first = start_generation(config_of(tmp_path), Rank(), FACTS, store)
    assert first.checkpoint is not None
    manifest = first.checkpoint.manifest
    running = CheckpointFolder(tmp_path)

    def publish(step: int) -> None:
        running.step_folder(1, step)
        running.prune(1, running.publish(dataclasses.replace(manifest, step=step)))

    with Busy(ROWS) as store:
        store.work = lambda: publish(8)
        second = start_generation(config_of(tmp_path), Rank(), FACTS, store)
    assert second.first_batch == 8
    publish(16)
    assert running.positions() == ((1, 16), (1, 8))


def test_all_ranks_start_from_the_same_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = Rank()
        resume_point = start_generation(config_of(tmp_path), first, FACTS, store)
        assert start_generation(config_of(tmp_path), Rank(1, first.said), FACTS, store) == resume_point


def test_ranks_need_one_folder(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        first = Rank()
        start_generation(config_of(tmp_path / "of-0"), first, FACTS, store)
        start_generation(config_of(tmp_path / "of-1"), Rank(), FACTS, store)
        for folder in ("of-1", "of-2"):
            with pytest.raises(
                InputError, match=f"{folder} on host {socket.gethostname()} is not the folder that rank 0"
            ):
                start_generation(config_of(tmp_path / folder), Rank(1, first.said), FACTS, store)


def test_without_a_folder_there_is_no_checkpoint(tmp_path: Path) -> None:
    with MemoryStore(ROWS) as store:
        resume_point = start_generation(Config(), Rank(), FACTS, store)
        assert (resume_point.checkpoint_id, resume_point.first_batch, resume_point.generation) == ("", 0, 0)
        assert resume_point.token.startswith("0-")


def test_only_settings_that_change_results_are_compared() -> None:
    settings = FACTS.settings
    for key in ("optim.rows_lr", "run.seed", "run.threads", "data.batch_size", "model.top_mlp", "pipeline.schedule"):
        assert key in settings
    for key in ("cache.rows", "oracle.lookahead", "store.url", "run.steps", "data.epochs", "data.workers", "run.dir"):
        assert key not in settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": result_settings(Config(optim=OptimConfig(dense="adam")), DATA)}, "optim.dense 'adagrad', this"),
        ({"settings": result_settings(Config(run=RunConfig(dtype="float64")), DATA)}, "run.dtype 'float32', this"),
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
        start_generation(config_of(tmp_path), Rank(), FACTS, store)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError, match=f"the checkpoint at step 0 was made with {words}"):
            start_generation(config_of(tmp_path), Rank(), dataclasses.replace(FACTS, **change), store)
        assert sorted(tmp_path.rglob("*")) == before


def test_allowed_differences_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MemoryStore(ROWS) as store:
        resume_point = start_generation(config_of(tmp_path), Rank(), FACTS, store)
    assert resume_point.checkpoint is not None
    manifest = resume_point.checkpoint.manifest
    settings = {key: value for key, value in manifest.settings.items() if key != "run.threads"}
    compare(dataclasses.replace(manifest, settings=settings), FACTS)  # from before the key existed
    assert capsys.readouterr().err == ""
    moved = dataclasses.replace(FACTS, identity=identity_with(name="/moved/day"))
    compare(manifest, moved)
    assert capsys.readouterr().err == ""
    compare(manifest, dataclasses.replace(FACTS, identity=dataclasses.replace(IDENTITY, code="d")))
    assert "was made with other cacher code" in capsys.readouterr().err


def test_full_hashes_and_a_checkpoint_of_sampled_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data.identity` can change; what could not be compared is said."""
    full = DataConfig(identity="full")
    facts = dataclasses.replace(
        FACTS, settings=result_settings(Config(data=full), DATA), identity=identity_with(sections=("s",))
    )
    compare(trained(), facts)
    assert "step 8 recorded sampled blocks of the data files: bytes between them were not" in capsys.readouterr().err
    compare(dataclasses.replace(trained(), identity=facts.identity.to_json()), FACTS)
    compare(dataclasses.replace(trained(), identity=facts.identity.to_json()), facts)
    assert capsys.readouterr().err == ""


def test_a_checkpoint_of_format_version_1_records_no_content(capsys: pytest.CaptureFixture[str]) -> None:
    old = dataclasses.replace(trained(), identity={"data": "1 files of 100 bytes (0123)", "code": "c"})
    compare(old, FACTS)
    assert "step 8 recorded no content of the data files: only their number and total" in capsys.readouterr().err
    with pytest.raises(InputError, match="other data: it has 1 files of 99 bytes, not 1 files of 100 bytes: use"):
        compare(old, dataclasses.replace(FACTS, identity=identity_with(num_bytes=99)))
    generated = dataclasses.replace(FACTS, identity=dataclasses.replace(IDENTITY, files=()))
    compare(dataclasses.replace(old, identity={"data": "0 files of 0 bytes (0123)", "code": "c"}), generated)
    assert capsys.readouterr().err == ""


def trained(*arithmetic: dict[str, str]) -> Manifest:
    """A checkpoint of one rank after the first batch."""
    dense = FileEntry(name="dense-0000.safetensors", num_bytes=1, xxh3_128="0" * 32)
    return Manifest(
        lineage="0" * 32,
        generation=1,
        step=8,
        parent_checkpoint_id="",
        token="1",
        epoch=1,
        world_size=1,
        settings=FACTS.settings,
        row_schema=FACTS.row_schema,
        identity=FACTS.identity.to_json(),
        arithmetic=arithmetic,
        parts=(Part(rank=0, dense=dense),),
    )


def test_another_arithmetic_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"device": "cpu", "CPU capability": "AVX512"}
    facts = dataclasses.replace(FACTS, arithmetic=(ours,))
    compare(trained({**ours, "CPU capability": "AVX2"}), facts)
    assert capsys.readouterr().err == (
        "note: the checkpoint at step 8 was made with CPU capability 'AVX2', this job has 'AVX512': results are no "
        "longer bit-identical to those of an uninterrupted run\n"
    )


def test_the_first_rank_with_another_arithmetic_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = {"CPU capability": "AVX512"}, {"CPU capability": "AVX2"}
    checkpoint = dataclasses.replace(trained(one, one, one), world_size=3)
    compare(checkpoint, dataclasses.replace(FACTS, world_size=3, arithmetic=(one, other, other)))
    (line,) = capsys.readouterr().err.splitlines()
    assert "was made with CPU capability 'AVX512' on rank 1, this job has 'AVX2': results are no longer" in line


def test_nothing_is_said_of_the_same_or_an_unknown_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of earlier versions record none; at checkpoint 0 nothing was computed."""
    ours = {"device": "cpu", "CPU capability": "AVX512"}
    facts = dataclasses.replace(FACTS, arithmetic=(ours,))
    compare(trained(ours), facts)
    compare(trained(), facts)
    compare(dataclasses.replace(trained({"CPU capability": "AVX2"}), parts=()), facts)
    assert capsys.readouterr().err == ""
