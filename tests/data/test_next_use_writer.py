from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data import next_use_writer
from data.conversion_manifest import PartRecord
from data.formats import open_source
from data.loader import open_loader
from data.next_use_source import told_source
from data.next_use_writer import LEAST_MEMORY, NextUseOrder, run_of, write_annotated
from tests.data.next_uses import annotated, check_next_uses, told_batches

TABLES = (0, 1, 1)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_tell_the_true_next_uses(tmp_path: Path, name: str, threads: int) -> None:
    path = annotated(tmp_path / name, 200, NextUseOrder(eval_fraction=0.1, threads=threads))
    config = DataConfig(path=path, format="parquet", batch_size=7, eval_fraction=0.1, epochs=3)
    batches = told_batches(config)
    check_next_uses(batches, TABLES)
    with open_loader(config, seed=0) as plain:
        for batch, other in zip(batches, plain, strict=True):
            np.testing.assert_array_equal(batch.values, other.values)
            assert other.next_use is None


def test_with_other_limits_one_epoch_is_still_exact(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.arrow", 100, NextUseOrder())
    check_next_uses(told_batches(DataConfig(path=path, format="parquet", batch_size=8, limit=60)), TABLES)


def test_shuffled_epochs_tell_the_true_next_uses(tmp_path: Path) -> None:
    # Groups of two blocks, so that blocks and groups are shuffled.
    rows = 70_000
    path = annotated(tmp_path / "a.arrow", rows, NextUseOrder(eval_fraction=0.5, seed=3, epochs=2), block_rows=20_000)
    config = DataConfig(path=path, format="parquet", batch_size=9_000, eval_fraction=0.5, epochs=2, shuffle=True)
    batches = told_batches(config, seed=3)
    assert len(batches) == 8
    check_next_uses(batches, TABLES)


def test_a_resumed_reader_tells_the_same(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.arrow", 90, NextUseOrder())
    config = DataConfig(path=path, format="parquet", batch_size=8, eval_fraction=0.0, epochs=2)
    batches = told_batches(config)
    source = told_source(open_source(config), config, 0)
    for place in (3, 11, 13):
        with open_loader(config, seed=0, source=source, state=batches[place].reader_state) as loader:
            for batch, other in zip(loader, batches[place + 1 :], strict=True):
                np.testing.assert_array_equal(batch.next_use, other.next_use)


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    annotated(tmp_path / "a.arrow", 20, NextUseOrder())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.arrow", "raw.parquet", "schema.toml"]


def test_wrong_outputs_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.arrow", 20, NextUseOrder())
    source = open_source(DataConfig(path=path, format="parquet"))
    with pytest.raises(InputError, match=r"file name ending in \.arrow or \.parquet"):
        write_annotated(source, str(tmp_path / "b.txt"), NextUseOrder())
    with pytest.raises(InputError, match="--memory must be at least"):
        write_annotated(source, str(tmp_path / "b.arrow"), NextUseOrder(memory_bytes=LEAST_MEMORY - 1))
    with pytest.raises(InputError, match="cannot write"):
        write_annotated(source, str(tmp_path / "gone" / "b.arrow"), NextUseOrder())


def test_an_annotated_file_can_be_annotated_for_another_order(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.arrow", 60, NextUseOrder())
    source = open_source(DataConfig(path=path, format="parquet"))
    order = NextUseOrder(seed=5)
    write_annotated(source, str(tmp_path / "b.arrow"), order)
    config = DataConfig(path=str(tmp_path / "b.arrow"), format="parquet", batch_size=8, eval_fraction=0.0, shuffle=True)
    check_next_uses(told_batches(config, seed=5), TABLES)


def test_equal_rows_and_orders_make_equal_files(tmp_path: Path) -> None:
    paths = [
        annotated(tmp_path / name, 60, NextUseOrder(threads=threads))
        for name, threads in (("a.arrow", 1), ("b.arrow", 3))
    ]
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    records = [PartRecord(part="a", rows=1, skipped=0, num_bytes=1, xxh3_64=digits) for digits in ("00", "01")]
    runs = [
        run_of([records[0]], NextUseOrder()),
        run_of([records[1]], NextUseOrder()),
        run_of(records, NextUseOrder()),
        run_of([records[0]], NextUseOrder(eval_fraction=0.5)),
        run_of([records[0]], NextUseOrder(seed=0)),
    ]
    assert len({*runs}) == len(runs)


def test_more_ids_than_the_memory_can_sort_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_use_writer, "MOST_GROUPS", 1)
    monkeypatch.setattr(next_use_writer, "BASE_BYTES", LEAST_MEMORY - 5_000)
    with pytest.raises(InputError, match=r"--memory must be at least \d+ MiB for \d+ ids of a table"):
        annotated(tmp_path / "a.arrow", 60, NextUseOrder(memory_bytes=LEAST_MEMORY))
