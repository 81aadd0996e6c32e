from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from data.cli import main
from data.columnar_writer import write_columnar
from data.criteo import CriteoSource
from data.formats import open_source
from data.loader import LookaheadLoader
from data.mlperf import MlperfSource
from data.narrowed import NarrowedSource
from data.parquet import ParquetSource
from data.source import Source
from data.synthetic import SyntheticSource
from data.synthetic_options import SyntheticFeature
from data.testing import assert_same_batches, check_source, read_all
from data.zipf import ZipfLaw
from tests.data.files import criteo_lines

BAGS = SyntheticSource(
    schema=DataSchema(
        label="y",
        dense=("p", "q"),
        features=(Feature(name="a", table="t"), Feature(name="b", table="u", weighted=True)),
        tables=(Table(name="t", rows=50, dim=4, pooling="mean"), Table(name="u", rows=9, hash=True)),
    ),
    features=(
        SyntheticFeature(law=ZipfLaw(vocabulary=50), missing=0.2),
        SyntheticFeature(law=ZipfLaw(vocabulary=1000), bag=2.5, bag_law="geometric", missing=0.1),
    ),
    rows=150,
)


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_reads_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    text = tmp_path / "a.tsv"
    text.write_bytes(criteo_lines(150))
    sources: list[Source] = [CriteoSource(files=(str(text),), block_bytes=5000), BAGS]
    for number, source in enumerate(sources):
        path = str(tmp_path / f"{number}{suffix}")
        written = write_columnar(source, path)
        assert (written.rows, written.skipped) == (150, 0)
        back = ParquetSource.at(path)
        assert [feature.name for feature in back.schema.features] == [item.name for item in source.schema.features]
        assert [table.dim for table in back.schema.tables] == [table.dim for table in source.schema.tables]
        assert_same_batches(
            read_all(LookaheadLoader(back, batch_size=16)), read_all(LookaheadLoader(source, batch_size=16))
        )
        check_source(dataclasses.replace(back, block_rows=40))


def test_every_page_of_a_parquet_file_has_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_columnar(BAGS, str(path))
    content = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    for chunk in map(group.column, range(group.num_columns)):
        flipped = bytearray(content)
        flipped[chunk.dictionary_page_offset + chunk.total_compressed_size - 1] ^= 1  # the last of the values
        path.write_bytes(flipped)
        with pytest.raises(InputError, match=r"a\.parquet: row group 0 is damaged: .*checksum"):
            read_all(LookaheadLoader(ParquetSource.at(str(path)), batch_size=16))


def test_hashed_ids_are_stored_hashed(tmp_path: Path) -> None:
    write_columnar(BAGS, str(tmp_path / "a.arrow"))
    assert ParquetSource.at(str(tmp_path / "a.arrow")).schema.table("u") == Table(name="u", rows=9)


def test_bad_rows_and_limits(tmp_path: Path) -> None:
    lines = criteo_lines(30).splitlines(keepends=True)
    lines[4] = lines[20] = b"bad\n"
    (tmp_path / "a.tsv").write_bytes(b"".join(lines))
    source = CriteoSource(files=(str(tmp_path / "a.tsv"),), bad_rows="skip", block_bytes=2000)
    out = tmp_path / "a.arrow"
    for limit, rows in ((0, 28), (4, 4), (5, 4), (25, 23), (1000, 28)):
        written = write_columnar(source, str(out), limit)
        assert written.rows == rows
        assert written.skipped == (min(limit or 30, 30) - rows)
        assert_same_batches(
            read_all(LookaheadLoader(ParquetSource.at(str(out)), batch_size=8)),
            read_all(LookaheadLoader(source, batch_size=8, limit=limit)),
        )


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_lines(3) + b"bad\n")
    for suffix in (".arrow", ".parquet"):
        with pytest.raises(InputError, match=r"a.tsv:4: expected 40"):
            write_columnar(CriteoSource.at(str(tmp_path / "a.tsv")), str(tmp_path / f"out{suffix}"))
    with pytest.raises(InputError, match=r"expected a file name ending in \.arrow or \.parquet, got 'x.csv'"):
        write_columnar(BAGS, "x.csv")
    with pytest.raises(InputError, match=r"cannot write /nowhere/x.arrow"):
        write_columnar(BAGS, "/nowhere/x.arrow")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tsv"]


SINGLE = {"y": [0, 1, 0], "a": [5, None, 7], "w": pa.array([0.5, None, 2.0]), "x": [1, 2, 3]}
SEVERAL = {"y": [1, 1, 0], "a": [[1, 2], [], [3]], "w": [[0.5, 1.0], [], [2.0]], "x": [[1, 2], [], [3]]}


@pytest.mark.parametrize("order", [(SINGLE, SEVERAL), (SEVERAL, SINGLE), (SINGLE, SINGLE, SEVERAL)])
def test_files_with_single_ids_and_files_with_lists_are_one_column(
    tmp_path: Path, order: tuple[dict[str, Any], ...]
) -> None:
    """A part of a folder has lists if another part has them."""
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = [{ name = "a", weight = "w" }, "x"]\n')
    (tmp_path / "in").mkdir()
    for number, columns in enumerate(order):
        pq.write_table(pa.table(columns), tmp_path / "in" / f"{number}.parquet")
    source = ParquetSource.at(str(tmp_path / "in"), schema_path=str(tmp_path / "s.toml"))
    assert source.multi_hot == {"a", "x"}
    batches = read_all(LookaheadLoader(source, batch_size=4))
    for out in ("out.arrow", "out.parquet", "out"):
        flags = ["--format", "parquet", "--schema", str(tmp_path / "s.toml")]
        assert main(["convert", str(tmp_path / "in"), str(tmp_path / out), *flags, "--next-use"]) == 0
        back = ParquetSource.at(str(tmp_path / out))
        assert_same_batches(read_all(LookaheadLoader(back, batch_size=4)), batches)


def test_a_reader_that_promises_single_ids_and_gives_several_is_refused(tmp_path: Path) -> None:
    one, two = dataclasses.replace(BAGS, rows=50), tmp_path / "a.arrow"
    write_columnar(one, str(two))
    source = ParquetSource.at(str(two))

    class Promise(NarrowedSource):
        multi_hot = frozenset()

    with pytest.raises(InputError, match=r"feature 'b': expected at most one id a row, because the reader's multi_hot"):
        write_columnar(Promise(source=source, features=(0, 1), dense=True), str(tmp_path / "b.arrow"))


@pytest.mark.parametrize("uses", ['dense = ["u"]', 'example_weight = "y"', 'example_weight = "u"', 'dense = ["y"]'])
def test_a_column_with_several_uses_is_refused(tmp_path: Path, uses: str) -> None:
    """A file with two columns of one name is none that can be read."""
    (tmp_path / "a.csv").write_text("y,u\n1,1\n")
    (tmp_path / "a.toml").write_text(f'label = "y"\nsparse = ["u"]\n{uses}\n')
    data = DataConfig(format="csv", path=str(tmp_path / "a.csv"), schema=str(tmp_path / "a.toml"))
    with pytest.raises(
        InputError, match=r"column '[uy]' has 2 uses in the schema, and a converted file has it for one"
    ):
        write_columnar(open_source(data), str(tmp_path / "a.arrow"))
    assert not (tmp_path / "a.arrow").exists()


def test_days_of_arrays_can_have_other_widths(tmp_path: Path) -> None:
    for day, width in (("day_0", 1), ("day_1", 3)):
        np.save(tmp_path / f"{day}_dense.npy", np.zeros((2, 1)))
        np.save(tmp_path / f"{day}_labels.npy", np.array([0, 1]))
        np.savez(tmp_path / f"{day}_sparse_multi_hot.npz", **{"0": np.arange(2 * width).reshape(2, width)})  # type: ignore[arg-type]
    source = MlperfSource.at(str(tmp_path))
    write_columnar(source, str(tmp_path / "out.arrow"))
    back = ParquetSource.at(str(tmp_path / "out.arrow"))
    assert_same_batches(read_all(LookaheadLoader(back, batch_size=4)), read_all(LookaheadLoader(source, batch_size=4)))
