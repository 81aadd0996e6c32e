from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagpipe.errors import JobError
from data.columns import Columns
from data.criteo import CriteoSource
from data.source import Block
from data.worker import BlockReaders, ReadTask, Shuffle, good_range, read_task
from tests.data.files import criteo_lines


def tasks(source: CriteoSource, shuffle: Shuffle | None = None) -> list[ReadTask]:
    return [
        ReadTask(segment=place, number=0, first_row=None, block=block, shuffle=shuffle)
        for place, segment in enumerate(source.segments())
        for block in source.blocks(segment)
    ]


def test_processes_give_the_callers_batches(criteo: CriteoSource) -> None:
    todo = tasks(criteo, Shuffle(seed=0, epoch=0, segment=0, low=0, high=None))
    with BlockReaders(criteo, 2) as there, BlockReaders(criteo, 0) as here:
        assert (there.max_in_flight, here.max_in_flight) == (5, 1)
        results = [there.submit(task) for task in todo]
        for task, result in zip(todo, results, strict=True):
            assert result().values.tobytes() == here.submit(task)().values.tobytes()


def test_shuffled_blocks_hold_only_the_rows_to_serve(criteo: CriteoSource) -> None:
    (whole,) = tasks(criteo)[:1]
    plain = read_task(criteo, whole)
    part = Shuffle(seed=0, epoch=0, segment=0, low=2, high=5)
    shuffled = read_task(criteo, ReadTask(segment=0, number=0, first_row=0, block=whole.block, shuffle=part))
    assert sorted(map(tuple, shuffled.dense.tolist())) == sorted(map(tuple, plain.dense[2:5].tolist()))


def test_raw_rows_as_good_rows(tmp_path: Path) -> None:
    lines = criteo_lines(10).splitlines(keepends=True)
    lines[0] = lines[4] = lines[5] = b"bad\n"
    (tmp_path / "a.tsv").write_bytes(b"".join(lines))
    source = CriteoSource(files=(str(tmp_path / "a.tsv"),), bad_rows="skip")
    columns = read_task(source, tasks(source)[0])
    # raw   0 1 2 3 4 5 6 7 8 9
    # good  . 0 1 2 . . 3 4 5 6
    assert good_range(columns, 0, 10) == (0, 7)
    assert good_range(columns, 0, 5) == (0, 3)
    assert good_range(columns, 4, 6) == (3, 3)
    assert good_range(columns, 5, 8) == (3, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DyingSource(CriteoSource):
    """Kills the process that reads it."""

    def read(self, block: Block) -> Columns:
        os._exit(3)


def test_a_dead_worker_is_a_job_error(criteo: CriteoSource) -> None:
    source = DyingSource(files=criteo.files)
    with BlockReaders(source, 1) as readers:
        result = readers.submit(tasks(source)[0])
        with pytest.raises(JobError, match="a parser process ended unexpectedly"):
            result()
        with pytest.raises(JobError, match="a parser process ended unexpectedly"):
            readers.submit(tasks(source)[0])


@pytest.fixture
def criteo(tmp_path: Path) -> CriteoSource:
    path = tmp_path / "criteo.tsv"
    path.write_bytes(criteo_lines(40))
    return CriteoSource(files=(str(path),), block_bytes=2000)
