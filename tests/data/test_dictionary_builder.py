from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from bagpipe.errors import InputError
from data import cli, dictionary_builder
from data.dictionary_builder import ORDERS, build_dictionaries
from data.parquet import ParquetSource

SCHEMA = """
label = "y"
sparse = ["city", { name = "seen", table = "city" }, "brand", "user"]
[tables.city]
strings = "dictionary"
[tables.brand]
strings = "dictionary"
dictionary = "brands.csv"
[tables.user]
strings = "hash"
"""
ROWS = {
    "y": [1, 0, 1, 1],
    "city": ["Rome", "Oslo", None, "Paris"],
    "seen": [["Oslo", "Bern"], [], ["Bern"], ["Bern", "Kiev", "Oslo"]],
    "brand": ["b", "a", "a", "c"],
    "user": ["u", "v", "w", "x"],
}


def source_at(folder: Path, **options: int) -> ParquetSource:
    (folder / "s.toml").write_text(SCHEMA)
    pq.write_table(pa.table(ROWS), folder / "a.parquet", row_group_size=2)
    return ParquetSource.at(str(folder / "a.parquet"), schema_path=str(folder / "s.toml"), **options)


def texts(path: Path) -> list[str]:
    return [line.split(",", 1)[1].replace('"', "") for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("block_rows", [1, 3, 100])
@pytest.mark.parametrize("pending", [0, 2, 1000])
def test_ids_by_first_occurrence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int, pending: int
) -> None:
    """Row by row, and feature by feature within a row; however the rows are cut and merged."""
    monkeypatch.setattr(dictionary_builder, "_PENDING", pending)
    built = build_dictionaries(source_at(tmp_path, block_rows=block_rows), "first")
    assert built == {str(tmp_path / "city.dictionary.csv"): 5, str(tmp_path / "brands.csv"): 3}
    assert texts(tmp_path / "city.dictionary.csv") == ["0,", "1,Rome", "3,Oslo", "3,Bern", "1,Paris", "1,Kiev"]
    assert texts(tmp_path / "brands.csv") == ["0,", "1,b", "2,a", "1,c"]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_texts_of_every_type_are_collected(tmp_path: Path, kind: pa.DataType) -> None:
    source_at(tmp_path)
    plain = pa.string() if pa.types.is_dictionary(kind) else kind
    columns = {name: pa.array(ROWS[name], plain) for name in ("city", "brand", "user")}
    if pa.types.is_dictionary(kind):
        columns = {name: column.dictionary_encode() for name, column in columns.items()}
    table = pa.table(ROWS | columns | {"seen": pa.array(ROWS["seen"], pa.list_(plain))})
    pyarrow.feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    source = ParquetSource.at(str(tmp_path / "a.arrow"), schema_path=str(tmp_path / "s.toml"))
    build_dictionaries(source, "first")
    assert texts(tmp_path / "city.dictionary.csv") == ["0,", "1,Rome", "3,Oslo", "3,Bern", "1,Paris", "1,Kiev"]


def test_ids_by_frequency_without_the_rare_ones(tmp_path: Path) -> None:
    build_dictionaries(source_at(tmp_path), "frequency", min_count=2)
    assert texts(tmp_path / "city.dictionary.csv") == ["3,", "3,Oslo", "3,Bern"]
    assert texts(tmp_path / "brands.csv") == ["2,", "2,a"]


def test_the_first_rows_only(tmp_path: Path) -> None:
    build_dictionaries(source_at(tmp_path, block_rows=2), "first", limit=3)
    assert texts(tmp_path / "brands.csv") == ["0,", "1,b", "2,a"]


def test_an_existing_dictionary_is_kept(tmp_path: Path) -> None:
    source = source_at(tmp_path)
    build_dictionaries(source, "first")
    with pytest.raises(InputError, match=r"city\.dictionary\.csv: the dictionary exists already: remove it"):
        build_dictionaries(source, "first")


def test_the_command_builds_and_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source_at(tmp_path)
    flags = ["convert", str(tmp_path / "a.parquet"), str(tmp_path / "out.arrow"), "--format", "parquet"]
    flags += ["--schema", str(tmp_path / "s.toml")]
    assert cli.main(flags) == 2
    assert re.search(r"city\.dictionary\.csv: no such dictionary: `python -m data convert", capsys.readouterr().err)
    assert cli.main([*flags, "--dictionaries", "frequency", "--min-count", "2"]) == 0
    assert "brands.csv: 1 strings" in capsys.readouterr().err
    table = pa.ipc.open_file(str(tmp_path / "out.arrow")).read_all()
    assert table.column("brand").to_pylist() == [0, 1, 1, 0]
    assert table.column("seen").to_pylist() == [[1, 2], [], [2], [2, 0, 1]]


@pytest.mark.parametrize("order", ORDERS)
def test_a_schema_without_dictionaries_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    path = tmp_path / "a.tsv"
    assert cli.main(["synth", "--out", str(path), "--rows", "3"]) == 0
    flags = ["convert", str(path), str(tmp_path / "out.arrow"), "--dictionaries", order]
    assert cli.main(flags) == 2
    assert '--dictionaries: no table of the schema has strings = "dictionary"' in capsys.readouterr().err
    assert cli.main([*flags[:3], "--min-count", "3"]) == 2
