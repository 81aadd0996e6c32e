from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from data.conversion_manifest import MANIFEST, ConversionManifest, PartRecord, record_of

INPUTS = {"a.tsv": "10 bytes", "b.tsv": "20 bytes"}


def manifest(folder: Path, *, redo: bool = False, limit: int = 0, **inputs: str) -> ConversionManifest:
    return ConversionManifest(folder, inputs=inputs or INPUTS, options={"limit": limit}, redo=redo)


def part(number: int) -> PartRecord:
    return PartRecord(part=f"part-{number:05}.arrow", rows=number, skipped=0, num_bytes=1, xxh3_64="00")


def test_records_come_back_in_order(tmp_path: Path) -> None:
    with manifest(tmp_path) as begun:
        begun.add(part(1))
    with manifest(tmp_path) as later:
        assert later.finished == {part(1).part: part(1)}
        later.add(part(0))
        later.finish([part(0).part, part(1).part])
    lines = (tmp_path / MANIFEST).read_text().splitlines()
    assert ['"conversion": 1' in lines[0], "part-00000" in lines[1], "part-00001" in lines[2]] == [True] * 3


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    with manifest(tmp_path) as begun:
        begun.add(part(0))
        begun.add(part(1))
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes()[:-5])
    with manifest(tmp_path) as later:
        assert [*later.finished] == [part(0).part]
        later.add(part(1))
    with manifest(tmp_path) as last:
        assert [*last.finished] == [part(0).part, part(1).part]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"limit": 3}, "its limit was 0, expected 3"),
        ({"a.tsv": "11 bytes", "b.tsv": "20 bytes"}, "a.tsv was 10 bytes, and is 11 bytes"),
        ({"a.tsv": "10 bytes"}, "b.tsv is an input of it"),
        ({**INPUTS, "c.tsv": "1 bytes"}, "c.tsv is no input of it"),
        ({"b.tsv": "20 bytes", "a.tsv": "10 bytes"}, "its inputs are in another order"),
    ],
)
def test_another_conversion_is_refused_or_replaced(tmp_path: Path, other: dict[str, str], message: str) -> None:
    with manifest(tmp_path) as begun:
        begun.add(part(0))
    (tmp_path / part(0).part).touch()
    with pytest.raises(InputError, match=f"holds another conversion: {message}; name another folder"):
        manifest(tmp_path, **other).__enter__()  # type: ignore[arg-type]
    with manifest(tmp_path, redo=True, **other) as anew:  # type: ignore[arg-type]
        assert not anew.finished
    assert not (tmp_path / part(0).part).exists()


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"{}\n")
    with pytest.raises(InputError, match=r"its _conversion\.jsonl is damaged"):
        manifest(tmp_path).__enter__()


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="expected an empty folder or one of an earlier conversion, got one with mine"):
        manifest(tmp_path, redo=True).__enter__()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with (
        manifest(tmp_path),
        pytest.raises(InputError, match="another process is converting into this folder"),
        manifest(tmp_path),
    ):
        pass


def test_the_record_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.arrow"
    path.write_bytes(b"rows")
    record = record_of(path, rows=4, skipped=1)
    assert (record.num_bytes, record.is_at(path)) == (4, True)
    path.write_bytes(b"rowz")
    assert not record.is_at(path)
    path.unlink()
    assert not record.is_at(path)
