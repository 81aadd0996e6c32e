from __future__ import annotations

from pathlib import Path

import pytest

from data.batcher import Batcher, BlockOrder
from data.criteo import CriteoSource
from data.row_order import Position, RowIndex, RowRange
from data.worker import BlockReaders
from tests.data.files import criteo_lines


@pytest.fixture
def source(tmp_path: Path) -> CriteoSource:
    path = tmp_path / "a.tsv"
    path.write_bytes(criteo_lines(60))
    return CriteoSource(files=(str(path),), block_bytes=2000)


def order_of(source: CriteoSource, row_range: RowRange, indexed: bool, shuffle: bool = False) -> BlockOrder:
    segments = source.segments()
    index = RowIndex.scan(source, segments, None) if indexed else None
    return BlockOrder(
        source=source, segments=segments, row_range=row_range, index=index, seed=0, shuffle=shuffle, epochs=1
    )  # fmt: skip


def test_blocks_outside_the_window_are_not_read(source: CriteoSource) -> None:
    whole = list(order_of(source, RowRange(low=0, high=None), indexed=True).tasks(Position()))
    tail = list(order_of(source, RowRange(low=55, high=60), indexed=True).tasks(Position()))
    assert len(whole) > 5
    assert 1 <= len(tail) <= 2
    assert tail[-1].block == whole[-1].block


def test_reading_stops_at_the_limit_without_an_index(source: CriteoSource) -> None:
    batcher = Batcher(order_of(source, RowRange(low=0, high=3), indexed=False), BlockReaders(source, 0), 2)
    assert [batch.num_examples for batch, _ in batcher.batches(Position())] == [2, 1]
    assert batcher.blocks_read == 1


def test_positions_name_the_block_they_stopped_in(source: CriteoSource) -> None:
    batcher = Batcher(order_of(source, RowRange(low=0, high=None), indexed=False), BlockReaders(source, 0), 4)
    raw_rows = 0
    for batch, position in batcher.batches(Position()):
        raw_rows += batch.num_examples
        assert position.batch == batch.index + 1
        assert position.first_row + position.row == raw_rows
    assert raw_rows == 60


def test_shuffled_blocks_know_their_part_of_the_window(source: CriteoSource) -> None:
    row_range = RowRange(low=0, high=50)
    tasks = list(order_of(source, row_range, indexed=True, shuffle=True).tasks(Position()))
    sizes = [task.shuffle.high - task.shuffle.low for task in tasks if task.shuffle and task.shuffle.high is not None]
    assert sum(sizes) == 50
    assert [task.block.start for task in tasks] != sorted(task.block.start for task in tasks)
