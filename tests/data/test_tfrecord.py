from __future__ import annotations

import builtins
import bz2
import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data import tfrecord
from data.checked_read import read_checked
from data.cli import main
from data.columns import Columns
from data.formats import open_source
from data.loader import LookaheadLoader
from data.string_hash import hash_strings
from data.testing import assert_same_batches, check_source, read_all
from data.tfrecord import TfRecordSource, masked_crc
from tests.data.documented import documented
from tests.data.files import write_examples

ROWS: list[dict[str, Any]] = [
    {"click": 1, "price": 3.0, "user": "u1", "tags": [5, 6], "tag_weight": [0.5, 2.0], "more": "x"},
    {"click": 0.0, "price": 9},
    {"click": 0, "user": ["u1", "u2"], "tags": [7], "tag_weight": [1.0]},
]


def write(folder: Path, rows: list[dict[str, Any] | None], name: str = "clicks.tfrecord") -> dict[str, str]:
    write_examples(folder / name, rows)
    (folder / "clicks.toml").write_text(documented("TFRecord", "toml")[0])
    return {"path": str(folder / name), "schema_path": str(folder / "clicks.toml")}


def read(source: TfRecordSource) -> list[Columns]:
    return [read_checked(source, block) for segment in source.segments() for block in source.blocks(segment)]


def test_features_become_columns(tmp_path: Path) -> None:
    (columns,) = read(TfRecordSource.at(**write(tmp_path, [*ROWS])))
    users = hash_strings(pa.array(["u1", "u1", "u2"])).tolist()
    assert columns.labels.tolist() == [1, 0, 0]
    assert columns.dense.tolist() == [[3], [9], [0]]
    assert columns.lengths.tolist() == [[1, 0, 2], [2, 0, 1], [1, 1, 0]]
    assert columns.values.tolist() == [*users, 5, 6, 7, 2, 4]
    assert columns.weights is not None
    assert columns.weights.tolist() == [1, 1, 1, 0.5, 2, 1, 1, 1]


def test_the_checksum_is_the_masked_crc_32c() -> None:
    """Of "123456789" the plain one is 0xe3069283 (RFC 3720); rotated and shifted as TensorFlow's crc32c.h does."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15 | crc << 17) & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


@pytest.mark.parametrize("name", ["clicks.tfrecord", "clicks.tfrecord.gz"])
def test_keeps_a_readers_promises(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any] | None] = [*ROWS] * 20
    rows[7:7] = [None, {"click": 7}, {"click": "no"}]
    source = TfRecordSource.at(**write(tmp_path, rows, name), bad_rows="skip", block_bytes=300)
    check_source(source)
    assert sum(part.bad_rows.size for part in read(source)) == 3
    files = [
        TfRecordSource.at(**write(tmp_path, [*ROWS] * 5)),
        TfRecordSource.at(**write(tmp_path, [*ROWS] * 5), block_bytes=1),
    ]
    batches = [read_all(LookaheadLoader(file, batch_size=4)) for file in files]
    assert_same_batches(*batches)


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [*ROWS])
    monkeypatch.chdir(tmp_path)
    command = documented("TFRecord", "sh")[0].splitlines()[1]
    assert main(command.split()[3:]) == 0
    found = read_all(
        LookaheadLoader(open_source(DataConfig(path="clicks.tfrecord", schema="clicks.toml")), batch_size=9)
    )
    converted = open_source(DataConfig(path="clicks.arrow"))
    assert_same_batches(read_all(LookaheadLoader(converted, batch_size=9)), found)


def test_bad_records_are_named(tmp_path: Path) -> None:
    for row, message in ((None, "got other bytes"), ({"click": 2}, "expected a label in [0, 1]"), ({}, "got null")):
        data = write(tmp_path, [*ROWS, row])
        with pytest.raises(
            InputError, match=re.escape(f"{data['path']}: record 3 (from 0): ") + ".*" + re.escape(message)
        ):
            read(TfRecordSource.at(**data))


def test_damage_ends_the_job_whatever_the_policy(tmp_path: Path) -> None:
    data = write(tmp_path, [*ROWS])
    path = Path(data["path"])
    whole = path.read_bytes()
    cases = [
        (whole[:-1], "record 2 (from 0): expected "),
        (whole[:-1] + b"\0", "record 2 (from 0): its checksum is wrong: the file is damaged"),
        (whole + b"\0", "record 3 (from 0): expected 12 bytes of length and checksum, got 1"),
        (
            b"\1" + whole[1:],
            "record 0 (from 0): the checksum of its length is wrong: no TFRecord file, or a damaged one",
        ),
        (b"", "the file is empty, expected records"),
    ]
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
            read(TfRecordSource.at(**data, bad_rows="skip"))


@pytest.mark.parametrize("name", ["clicks.tfrecord", "clicks.gz", "clicks"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zlib.compress, bz2.compress])
def test_the_first_bytes_tell_compression_and_not_the_name(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    """TensorFlow's writers compress by gzip or zlib, and give no suffix."""
    data = write(tmp_path, [*ROWS])
    (plain,) = read(TfRecordSource.at(**data))
    whole = Path(data["path"]).read_bytes()
    path = tmp_path / name
    path.write_bytes(pack(whole))
    source = TfRecordSource.at(str(path), schema_path=data["schema_path"])
    if pack is bz2.compress:
        with pytest.raises(
            InputError, match=r"clicks.*: expected records, plain or compressed by gzip or zlib, got .* by"
        ):
            read(source)
        return
    (columns,) = read(source)
    assert columns.values.tolist() == plain.values.tolist()
    if pack is not bytes:
        kind = pack.__module__.rpartition(".")[2]
        for content, message in (
            (pack(whole)[:-5], f"expected the end of the {kind} stream, got a file cut short"),
            (pack(whole)[:-2] + b"\xaa\xaa", f"expected {kind} data, got a corrupt stream"),
        ):
            path.write_bytes(content)
            with pytest.raises(InputError, match=rf"{path}: record \d \(from 0\): {message}"):
                read(source)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path, [*ROWS])
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "google_crc32c":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **more)

    tfrecord._crc_function.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"needs the Python package google-crc32c, .*: pip install google-crc32c$"):
        TfRecordSource.at(**data)


BAD_SCHEMAS = [
    ('label = "y"\nsparse = [{ name = "a", separator = "|" }]', "column 'a': separator is for text"),
    ('label = "y"\ndense = ["a"]\nsparse = ["a"]', "column 'a' is named as double and as list<item: int64>"),
]


@pytest.mark.parametrize(("schema", "message"), BAD_SCHEMAS)
def test_other_schemas_are_refused(tmp_path: Path, schema: str, message: str) -> None:
    data = write(tmp_path, [*ROWS])
    Path(data["schema_path"]).write_text(schema)
    with pytest.raises(InputError, match=re.escape(message)):
        TfRecordSource.at(**data)
    with pytest.raises(InputError, match="tfrecord needs a TOML file"):
        TfRecordSource.at(data["path"], schema_path="")
