"""`CheckpointWriter`: parts in order, errors reported once, and a clean end."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry, Part
from bagpipe.checkpoint.writer import CheckpointPaths, CheckpointWriter, PendingCheckpoint
from bagpipe.errors import JobError
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=2),), optimizer="sgd", dtype="float32", seed=0)


def request(*ids: int) -> WriteRequest:
    return WriteRequest(table=0, ids=np.array(ids, np.int64), rows=np.ones((len(ids), 2), np.float32))


class Ends:
    """Results of a writer."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, Part | None]] = []
        self.errors: list[BaseException] = []

    def on_part(self, step: int, epoch: int, part: Part | None) -> None:
        self.parts.append((step, epoch, part))


def wait(writer: CheckpointWriter) -> None:
    writer.wait_for(writer.is_idle, lambda: None)


def test_parts_come_in_order() -> None:
    ends = Ends()
    writer = CheckpointWriter(0, None, SCHEMA, ends.on_part, ends.errors.append)
    writer.start()
    for epoch in (1, 2, 3):
        writer.complete(PendingCheckpoint(step=10 * epoch, epoch=epoch, missing=set()))
    wait(writer)
    writer.close()
    assert ends.parts == [(10, 1, None), (20, 2, None), (30, 3, None)]


def test_the_first_error_is_reported_once_and_ends_writing(tmp_path: Path) -> None:
    ends = Ends()
    writer = CheckpointWriter(
        0, CheckpointPaths(generation=tmp_path / "gone", step=Path), SCHEMA, ends.on_part, ends.errors.append
    )
    writer.start()
    for _ in range(3):
        writer.rows(lambda: [request(1, 2)], 16, epoch=1, step=0)
    with pytest.raises(JobError, match=r"a checkpoint cannot be written: No such file or directory .*gone/journal-"):
        writer.wait_for(lambda: False, lambda: None)
    writer.close()
    assert len(ends.errors) == 1
    assert isinstance(ends.errors[0].__cause__, OSError)


def test_rows_are_written_while_a_part_is_published(tmp_path: Path) -> None:
    """Publishing takes long if other ranks are late or all rows are rewritten; lanes must not wait for it."""
    ends = Ends()
    begun, may_end = threading.Event(), threading.Event()

    def publish(step: int, epoch: int, part: Part | None) -> None:
        begun.set()
        may_end.wait(30)
        ends.on_part(step, epoch, part)

    writer = CheckpointWriter(
        0, CheckpointPaths(generation=tmp_path, step=lambda step: tmp_path), SCHEMA, publish, ends.errors.append
    )
    writer.start()
    writer._put(writer._parts, lambda: publish(10, 1, None))
    assert begun.wait(30)
    writer.rows(lambda: [request(1, 2)], 16, epoch=2, step=11)
    writer.wait_for(
        lambda: writer.backlog_bytes == 0, lambda: None if writer.num_parts else AssertionError("published")
    )
    assert not writer.is_idle()
    may_end.set()
    wait(writer)
    writer.close()
    assert ends.parts == [(10, 1, None)]


def test_deletions_are_in_the_part_of_their_epoch(tmp_path: Path) -> None:
    ends = Ends()
    writer = CheckpointWriter(
        0, CheckpointPaths(generation=tmp_path, step=lambda step: tmp_path), SCHEMA, ends.on_part, ends.errors.append
    )
    writer.start()
    writer.rows(lambda: [request(1, 2, 3)], 24, epoch=1, step=4)
    writer.deletions([DeleteRequest(0, np.array([2]))], epoch=1, step=5)
    writer.deletions([DeleteRequest(0, np.array([3, 1]))], epoch=2, step=11)
    writer.wait_for(lambda: writer.backlog_bytes == 0, lambda: None)
    entry = FileEntry(name="dense-0000.safetensors", num_bytes=0, xxh3_128="")
    for epoch in (1, 2):
        writer.complete(PendingCheckpoint(step=10 * epoch, epoch=epoch, missing=set(), file=entry))
    wait(writer)
    writer.close()
    assert not ends.errors
    sealed = [[(file.row_bytes, file.num_rows) for file in part.rows] for _, _, part in ends.parts if part is not None]
    assert sealed == [[(0, 1), (8, 3)], [(0, 2)]]
    assert not list(tmp_path.glob("journal-*"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BrokenCheckpoint("full-00000010-000016.npy: cannot be read"), "a checkpoint cannot be made: full-"),
        (JobError("not all ranks"), "^not all ranks"),
    ],
)
def test_an_error_in_mid_run_is_never_the_users_input(error: Exception, words: str) -> None:
    ends = Ends()

    def refuse(step: int, epoch: int, part: Part | None) -> None:
        raise error

    writer = CheckpointWriter(0, None, SCHEMA, refuse, ends.errors.append)
    writer.start()
    writer.complete(PendingCheckpoint(step=10, epoch=1, missing=set()))
    with pytest.raises(JobError, match=words):
        writer.wait_for(lambda: False, lambda: None)
    writer.close()
    assert [type(error) for error in ends.errors] == [JobError]


def test_finishing_after_an_error_raises_it() -> None:
    """For example, after an error of the very last checkpoint."""
    ends = Ends()

    def refuse(step: int, epoch: int, part: Part | None) -> None:
        raise JobError("not all ranks")

    writer = CheckpointWriter(0, None, SCHEMA, refuse, ends.errors.append)
    writer.start()
    writer.complete(PendingCheckpoint(step=10, epoch=1, missing=set()))
    with pytest.raises(JobError):
        writer.wait_for(lambda: False, lambda: None)
    writer.close()
    writer._parts.clear()
    writer._work.clear()
    assert writer.is_idle()
    with pytest.raises(JobError, match="not all ranks"):
        wait(writer)


def test_waits_end_when_the_job_has_failed() -> None:
    ends = Ends()
    writer = CheckpointWriter(0, None, SCHEMA, ends.on_part, ends.errors.append)
    writer.start()
    with pytest.raises(KeyError):
        writer.wait_for(lambda: False, lambda: KeyError())
    writer.close()


def test_the_end_leaves_no_journal(tmp_path: Path) -> None:
    """Pending work is finished, and journals are removed."""
    ends = Ends()
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> list[WriteRequest]:
        begun.set()
        may_end.wait(30)
        return [request(5)]

    writer = CheckpointWriter(
        0, CheckpointPaths(generation=tmp_path, step=lambda step: tmp_path), SCHEMA, ends.on_part, ends.errors.append
    )
    writer.start()
    writer.rows(slow, 8, epoch=1, step=0)
    begun.wait(30)
    closing = threading.Thread(target=writer.close)
    closing.start()
    may_end.set()
    closing.join()
    assert not list(tmp_path.iterdir())
    assert not ends.errors
