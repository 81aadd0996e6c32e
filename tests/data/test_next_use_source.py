from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.formats import open_source
from data.next_use_source import told_source
from data.next_use_writer import NextUseOrder
from tests.data.next_uses import annotated

SHUFFLED = NextUseOrder(seed=3)


def told(path: Path, seed: int = 0, **settings: Any) -> object:
    config = DataConfig(path=str(path), format="parquet", **{"eval_fraction": 0.0, **settings})
    return told_source(open_source(config, seed), config, seed)


def test_files_that_are_not_annotated_tell_nothing(tmp_path: Path) -> None:
    annotated(tmp_path / "a.parquet", 20, NextUseOrder())
    table = pq.read_table(tmp_path / "a.parquet")
    metadata = {key: value for key, value in table.schema.metadata.items() if b"next_use" not in key}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "b.parquet")
    assert told(tmp_path / "b.parquet") is None
    config = DataConfig(format="synthetic")
    assert told_source(open_source(config), config, 0) is None


@pytest.mark.parametrize(
    ("order", "seed", "settings", "problem"),
    [
        (NextUseOrder(), 0, {"shuffle": True}, "of the order of the file, data.shuffle is on"),
        (SHUFFLED, 3, {}, "of a shuffled order, data.shuffle is off"),
        (SHUFFLED, 4, {"shuffle": True}, "run.seed was 3, is 4"),
        (SHUFFLED, 3, {"shuffle": True, "epochs": 2}, "of 1 shuffled epochs, data.epochs is 2"),
        (SHUFFLED, 3, {"shuffle": True, "limit": 5}, "rows of an epoch .* was 20, is 5"),
        (SHUFFLED, 3, {"shuffle": True, "shuffle_buffer": 9}, "without data.shuffle_buffer, got 9"),
    ],
)
def test_another_order_is_refused(
    tmp_path: Path, order: NextUseOrder, seed: int, settings: dict[str, Any], problem: str
) -> None:
    annotated(tmp_path / "a.arrow", 20, order)
    with pytest.raises(InputError, match=problem):
        told(tmp_path / "a.arrow", seed, **settings)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    annotated(tmp_path / "a.parquet", 20, NextUseOrder())
    text = (tmp_path / "schema.toml").read_text()
    (tmp_path / "other.toml").write_text(
        text.replace('name = "item"\ntable = "items"', 'name = "item"\ntable = "users"')
    )
    with pytest.raises(InputError, match=r"other features or tables than those of data\.schema"):
        told(tmp_path / "a.parquet", schema=str(tmp_path / "other.toml"))


def test_an_annotation_must_be_whole(tmp_path: Path) -> None:
    annotated(tmp_path / "a.parquet", 20, NextUseOrder())
    table = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 12), tmp_path / "short.parquet")
    with pytest.raises(InputError, match="next uses are of 20 rows, the file has 12"):
        told(tmp_path / "short.parquet")
    pq.write_table(table.drop_columns(["item.next_use"]), tmp_path / "without.parquet")
    with pytest.raises(InputError, match=r"expected next uses \(uint32\) in column 'item.next_use', got none"):
        told(tmp_path / "without.parquet")
    place = table.schema.get_field_index("item.next_use")
    other = table.set_column(place, "item.next_use", table.column(place).cast(pa.int64()))
    pq.write_table(other, tmp_path / "wrong.parquet")
    with pytest.raises(InputError, match=r"in column .item\.next_use., got int64"):
        told(tmp_path / "wrong.parquet")


def test_files_of_several_runs_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    for rows, name in ((20, "a"), (21, "b")):
        annotated(tmp_path / f"{name}.parquet", rows, NextUseOrder())
        (tmp_path / f"{name}.parquet").rename(folder / f"{name}.parquet")
    with pytest.raises(InputError, match="another run of convert"):
        told(folder)
    table = pq.read_table(folder / "b.parquet")
    metadata = {key: value for key, value in table.schema.metadata.items() if b"next_use" not in key}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "b.parquet")
    with pytest.raises(InputError, match="not annotated with next uses, but others"):
        told(folder)
    pq.write_table(pq.read_table(folder / "a.parquet"), folder / "b.parquet")
    with pytest.raises(InputError, match="file 1 of 1 annotated ones, got it as file 1 of 2"):
        told(folder)
