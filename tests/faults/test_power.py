"""A power failure loses only changes that the store and the checkpoint folder had not synced."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.errors import InputError
from bagpipe.store.interface import ReadResult
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.checkpoint.samples import content, draw_rows, rows_of, save
from tests.faults.power import PowerDisk, why_no_power_disk
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(bool(why_no_power_disk()), reason=why_no_power_disk() or "it can"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def write(path: Path, data: bytes, *, sync: bool) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_the_disk_forgets_what_was_not_synced(folder: Path) -> None:
    with PowerDisk(folder) as disk:
        inner = folder / "inner"
        inner.mkdir()
        write(inner / "kept", b"one", sync=True)
        write(inner / "kept", b" two", sync=False)
        write(inner / "empty", b"lost", sync=False)
        os.link(inner / "kept", inner / "again")
        sync_folder(inner)
        sync_folder(folder)
        write(inner / "nameless", b"synced, but not its folder", sync=True)
        (inner / "kept").rename(inner / "renamed")
        assert (inner / "renamed").read_bytes() == b"one two"
        assert sorted(os.listdir(inner)) == ["again", "empty", "nameless", "renamed"]
        disk.fail()
        assert os.listdir(folder) == [], "what lies under the mount"
        disk.restore()
        assert sorted(os.listdir(inner)) == ["again", "empty", "kept"]
        assert [(inner / name).read_bytes() for name in ("again", "empty", "kept")] == [b"one", b"", b"one"]


def test_a_file_in_use_fails_with_the_power(folder: Path) -> None:
    with PowerDisk(folder) as disk:
        descriptor = os.open(folder / "file", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"a")
        disk.fail()
        with pytest.raises(OSError, match=r"abort|not connected"):
            os.write(descriptor, b"b")
        with suppress(OSError):
            os.close(descriptor)


SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")


def survivors(disk: PowerDisk, policy: str, folder: Path) -> ReadResult:
    """Rows 0 to 68 after acknowledged writes and a power failure. Write n holds rows n to n + 49."""
    options = {"dir": str(disk.folder), "appendonly": "yes", "appendfsync": policy}
    with EmbeddedServer(folder / "first", options=options) as server:
        with open_store(server.url, namespace="job", schema=SCHEMA) as store:
            for number in range(20):
                store.write(0, np.arange(number, number + 50), np.full((50, 4), number, np.float32))
            disk.fail()
        with suppress(ProcessLookupError):
            os.kill(server.process_id, signal.SIGKILL)
    disk.restore()
    with EmbeddedServer(folder / "second", options=options) as server:
        with open_store(server.url, namespace="job", schema=SCHEMA) as store:
            return store.read(0, np.arange(69))


@pytest.mark.redis
def test_a_server_that_syncs_always_keeps_what_it_acknowledged(folder: Path, tmp_path: Path) -> None:
    with PowerDisk(folder, names_are_safe=True) as disk:
        found = survivors(disk, "always", tmp_path)
    assert found.found.all()
    assert found.rows[:, 0].tolist() == [*range(20), *[19] * 49]


@pytest.mark.redis
def test_a_server_that_leaves_syncing_to_the_kernel_keeps_nothing(folder: Path, tmp_path: Path) -> None:
    """The control for the test above: without syncs, nothing survives."""
    with PowerDisk(folder, names_are_safe=True) as disk:
        assert not survivors(disk, "no", tmp_path).found.any()


def test_a_checkpoint_survives_a_power_failure_during_the_next(folder: Path) -> None:
    """At every change of a job's first two saves, a power failure keeps the last acknowledged save or a later one."""
    random = np.random.default_rng(7)
    first, second = draw_rows(random, 40), draw_rows(random, 40)
    contents = {10: first, 20: first | second}
    ends: Counter[tuple[int, int]] = Counter()
    with PowerDisk(folder) as disk:
        for num_changes in itertools.count():
            checkpoints, said = CheckpointFolder(folder / "jobs" / f"{num_changes}"), 0
            disk.fail_after(num_changes)
            with suppress(InputError, BrokenCheckpoint, SafetensorError, OSError):
                generation = checkpoints.new_generation()
                before = save(checkpoints, generation, 10, [first])
                said = 10
                save(checkpoints, generation, 20, [second], before=before)
                said = 20
            disk.fail()
            disk.restore()
            found = checkpoints.newest(lambda line: None)
            step = 0 if found is None else found.manifest.step
            ends[said, step] += 1
            assert step >= said
            if found is not None:
                assert content(rows_of(found)) == contents[step]
            if said == 20:
                break
    assert ends[0, 0] > 10
    assert ends[10, 10] > 10
    assert ends[20, 20] == 1


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Final numbers of the job without a power failure."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run_forked([*JOB, "--result", str(folder / "result.json")], folder).code == 0
    return digests(folder / "result.json")


@pytest.mark.redis
@pytest.mark.parametrize(
    ("policy", "dies_at"),
    [("always", "after-rotation:3"), ("everysec", "after-manifest:3"), ("no", "after-commit:3")],
)
def test_a_job_resumes_after_a_power_failure(
    policy: str, dies_at: str, folder: Path, tmp_path: Path, expected: object
) -> None:
    """The store keeps all acknowledged writes, all but the last second, or none."""
    rows = tmp_path / "rows"
    rows.mkdir()
    options = {"dir": str(rows), "appendonly": "yes", "appendfsync": policy}
    with PowerDisk(folder) as checkpoints, PowerDisk(rows, names_are_safe=True) as disk:
        with EmbeddedServer(tmp_path / "server", options=options) as server:
            arguments = ["--store.url", server.url, "--checkpoint.dir", str(folder / "checkpoints")]
            job = Resumed(folder=tmp_path, arguments=arguments)
            assert job.run(dies_at=dies_at).code == -signal.SIGKILL
            checkpoints.fail()
            disk.fail()
            with suppress(ProcessLookupError):
                os.kill(server.process_id, signal.SIGKILL)
        checkpoints.restore()
        disk.restore()
        with EmbeddedServer(tmp_path / "server", options=options):
            done = job.run()
    assert done.code == 0, done.err
    assert digests(job.result) == expected
    # The thread that dies at a rotation can be ahead of the checkpoint thread at the first checkpoints.
    assert job.resumed_from() in ((None, 5, 10) if dies_at.startswith("after-rotation") else (5, 10, 15))
    assert (policy == "no") == ("8 of the store's 8 buckets were loaded" in done.err) or policy == "everysec"
