from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.config.sections import DataConfig
from data.columnar_writer import write_columnar
from data.formats import open_source
from data.next_use_files import PlainFiles
from data.next_use_sort import FAR, NextUseSort
from tests.data.next_uses import SCHEMA


@pytest.fixture
def files(tmp_path: Path) -> PlainFiles:
    import pyarrow.parquet as pq

    table = {
        "y": pa.array([0.0, 1.0, 0.0], pa.float32()),
        "user": pa.array([7, None, 7]),
        "seen": pa.array([[1, 2], [], [3]]),
        "item": pa.array([2, 1, 2]),
    }
    pq.write_table(pa.table(table), tmp_path / "raw.parquet")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    config = DataConfig(path=str(tmp_path / "raw.parquet"), schema=str(tmp_path / "schema.toml"), format="parquet")
    write_columnar(open_source(config), str(tmp_path / "plain.arrow"))
    return PlainFiles([str(tmp_path / "plain.arrow")] * 2)


def test_ids_of_all_files_are_counted_by_table(files: PlainFiles) -> None:
    assert files.count_ids() == [4, 12]


def test_ids_of_a_table_come_in_the_order_of_the_examples(files: PlainFiles) -> None:
    (block,) = files.source.blocks(files.source.segments()[0])
    rows = files.rows(block)
    assert rows.schema.names == ["user", "seen", "item"]
    in_order = files.uses(rows, None)
    assert [(ids.tolist(), examples.tolist()) for ids, examples in in_order.tables] == [
        ([7, 7], [0, 2]),
        ([1, 2, 2, 1, 3, 2], [0, 0, 0, 1, 2, 2]),
    ]
    shuffled = files.uses(rows, np.array([1, -1, 0]))  # the second row is left out
    assert [(ids.tolist(), examples.tolist()) for ids, examples in shuffled.tables] == [
        ([7, 7], [0, 1]),
        ([3, 2, 1, 2, 2], [0, 0, 1, 1, 1]),
    ]


def test_distances_come_by_feature(files: PlainFiles, tmp_path: Path) -> None:
    (block,) = files.source.blocks(files.source.segments()[0])
    uses = files.uses(files.rows(block), np.array([1, -1, 0]))
    with NextUseSort([1, 2], max_entries=100, threads=1, folder=tmp_path) as sort:
        sort.add(uses.tables, 2)
        sort.solve(cyclic=False)
        found = files.distances(uses, 0, sort)
        left_out = files.distances(uses, None, sort)
    assert [each.tolist() for each in found] == [[FAR, 1], [FAR, 0, FAR], [FAR, FAR, 1]]
    assert [each.tolist() for each in left_out] == [[FAR] * 2, [FAR] * 3, [FAR] * 3]
