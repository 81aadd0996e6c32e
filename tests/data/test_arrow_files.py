from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.arrow_files import SCHEMA_KEY, GroupReader, embed_schema, embedded_schema, open_arrow
from data.schema_file import SchemaFile, criteo_schema
from data.source import file_version


def write_ipc(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def test_parquet_and_ipc_are_detected_by_content(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})
    pq.write_table(table, tmp_path / "one.arrow", row_group_size=2)
    write_ipc(tmp_path / "two.parquet", table)
    for name in ("one.arrow", "two.parquet"):
        file = open_arrow(str(tmp_path / name))
        assert file.group_rows == (2, 1)
        assert [block.to_pydict() for block in file.blocks(1, ["b"], 8)] == [{"b": [6]}]


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "cut.parquet")
    write_ipc(tmp_path / "cut.arrow", pa.table({"a": list(range(1000))}))
    for name in ("cut.parquet", "cut.arrow"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(InputError, match="damaged or cut short") as raised:
            open_arrow(str(path))
        assert "\n" not in str(raised.value)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_text("")
    with pytest.raises(InputError, match="expected a parquet or Arrow IPC file, got one that begins with b'hell'"):
        open_arrow(str(tmp_path / "text"))
    (tmp_path / "packed").write_bytes(pa.compress(b"PAR1", "zstd", asbytes=True))
    with pytest.raises(InputError, match=r"expected a parquet or Arrow IPC file, got a file compressed by zstd$"):
        open_arrow(str(tmp_path / "packed"))
    with pytest.raises(InputError, match="the file is empty"):
        open_arrow(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="No such file"):
        open_arrow(str(tmp_path / "missing"))


def test_a_group_that_is_gone_is_refused(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write_ipc(tmp_path / "a.arrow", table)
    for name in ("a.parquet", "a.arrow"):
        path = str(tmp_path / name)
        with pytest.raises(InputError, match=rf"{name}: row group 2 is damaged: "):
            GroupReader().read(path, file_version(path), 2, ("a",), start=0, block_rows=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_a_page_with_a_checksum_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "flipped.parquet"
    table = pa.table({"a": list(range(300)), "b": [[number % 7] * (number % 3) for number in range(300)]})
    compression = data.draw(st.sampled_from(["none", "snappy", "zstd"]))
    pq.write_table(table, path, row_group_size=150, compression=compression, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(data.draw(st.integers(0, 1)))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(start, start + chunk.total_compressed_size - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    found, refusal = None, ""
    try:
        reader, version = GroupReader(), file_version(str(path))
        parts = [reader.read(str(path), version, 1, ("a", "b"), start=start, block_rows=50) for start in (0, 50, 100)]
        found = pa.concat_tables(parts)
    except InputError as error:
        refusal = str(error)
    if found is None:
        assert refusal.startswith(f"{path}: row group 1 is damaged: ")
        assert "\n" not in refusal
    else:
        assert found.equals(table.slice(150)), "the bit is in a part of a page header that no reader uses"


def test_a_schema_travels_in_the_metadata() -> None:
    file = SchemaFile(schema=criteo_schema(), weights={"C1": "C1.weight"})
    found = embedded_schema("x", pa.schema([], metadata=embed_schema(file)))
    assert found is not None
    assert (found.schema, dict(found.weights)) == (file.schema, dict(file.weights))
    assert embedded_schema("x", pa.schema([])) is None


@pytest.mark.parametrize("text", [b"{}", b"no json", b'{"version": 1}', b'{"version": 2}', b"[]"])
def test_a_damaged_schema_is_refused(text: bytes) -> None:
    with pytest.raises(InputError, match=r"x: .*(damaged|expected schema version 1, got 2)"):
        embedded_schema("x", pa.schema([], metadata={SCHEMA_KEY: text}))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_blocks_in_any_order(tmp_path: Path, kind: str) -> None:
    table = pa.table({"a": list(range(100)), "b": [[number] * (number % 4) for number in range(100)]})
    path = str(tmp_path / "data")
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(path, "wb") as sink:
            make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with make(sink, table.schema) as writer:
                writer.write_table(table)
    reader, version = GroupReader(), file_version(path)
    for start in (0, 30, 60, 90, 60, 0, 90, 90, 30):
        block = reader.read(path, version, 0, ("b", "a"), start=start, block_rows=30)
        assert block.combine_chunks().equals(table.slice(start, 30).select(["b", "a"]).combine_chunks())
    with pytest.raises(InputError, match="row group 0 is damaged: it has no row 120"):
        reader.read(path, version, 0, ("a",), start=120, block_rows=30)


def test_a_group_of_few_bytes_and_many_rows_takes_the_memory_of_a_block(tmp_path: Path) -> None:
    path, num_rows, block_rows = str(tmp_path / "zeros.parquet"), 20_000_000, 10_000
    pq.write_table(pa.table({"a": np.zeros(num_rows, np.int64)}), path, row_group_size=num_rows, compression="zstd")
    assert Path(path).stat().st_size < 200_000
    reader, version = GroupReader(), file_version(path)
    before = pa.total_allocated_bytes()
    for start in range(0, 50 * block_rows, block_rows):
        block = reader.read(path, version, 0, ("a",), start=start, block_rows=block_rows)
        assert block.num_rows == block_rows
        assert pa.total_allocated_bytes() - before < 16 << 20
