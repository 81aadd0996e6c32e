from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint.codec import decode_manifest, decode_part, encode
from bagpipe.checkpoint.manifest import FORMAT_VERSION, BrokenCheckpoint, FileEntry, Manifest, Part, RowFile
from bagpipe.errors import InputError
from tests.checkpoint.samples import LINEAGE, manifest_of

NEWER = FORMAT_VERSION + 1


def entry(name: str) -> FileEntry:
    return FileEntry(name=name, num_bytes=3, xxh3_128=LINEAGE)


def row_file(name: str, step: int = 5) -> RowFile:
    return RowFile(file=entry(name), row_bytes=12, num_rows=2, full=False, step=step)


PART = Part(
    rank=0,
    dense=entry("dense-0000.safetensors"),
    rows=(row_file("rows-a.npy"),),
    dirty=entry("dirty.npy"),
    num_groups=(1, 0),
    progress={"loss_sum": 0.1 + 0.2, "samples": 2**53 + 1, "none": None},
)
MANIFEST = manifest_of(3, 5, parts=(PART,), base=(row_file("rows-0.npy", 4),))


def deletions(name: str, step: int = 5) -> RowFile:
    return dataclasses.replace(row_file(name, step), row_bytes=0)


#: Rows deleted in this interval by rank 0, and in the one before.
DELETING = manifest_of(
    3,
    5,
    parts=(dataclasses.replace(PART, rows=(deletions("deleted-00000005-0000.npy"), row_file("rows-a.npy"))),),
    base=(deletions("deleted-00000004-0000.npy", 4), row_file("rows-0.npy", 4)),
)


def changed(value: object, *path: object, to: object) -> bytes:
    """Bytes of a record with one changed field and a valid checksum, as another program would write it."""
    document = json.loads(encode(value))
    document.pop("checksum")
    place = document
    for step in path[:-1]:
        place = place[step]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return _signed(document)


def _signed(document: dict[str, object]) -> bytes:
    from bagpipe.checkpoint.codec import _checksum

    document = {name: value for name, value in document.items() if name != "checksum"}
    return json.dumps(document | {"checksum": _checksum(document)}).encode()


def test_records_read_back():
    assert decode_manifest(encode(MANIFEST), "x") == MANIFEST
    assert decode_part(encode(PART), "x") == PART
    assert decode_part(encode(dataclasses.replace(PART, dirty=None)), "x").dirty is None
    assert (MANIFEST.checkpoint_id, [file.name for file in MANIFEST.files]) == (
        f"{LINEAGE}:{MANIFEST.token}:5",
        ["dense-0000.safetensors", "dirty.npy", "rows-0.npy", "rows-a.npy"],
    )


def test_a_manifest_with_deletions():
    """The file says how deletions are named; regenerate it from `encode(DELETING)`."""
    golden = Path(__file__).parents[1] / "golden" / "checkpoints" / "manifest_with_deletions.json"
    assert encode(DELETING).decode() == golden.read_text()
    assert decode_manifest(golden.read_bytes(), "x") == DELETING
    assert [file.is_deletions for file in DELETING.row_files] == [True, False, True, False]


KNOWN = {"known_rows": {"name": "known-rows.npy", "num_bytes": 9, "xxh3_128": "7" * 32}}


def test_a_manifest_is_of_the_earliest_version_that_has_all_of_it():
    """An earlier bagpipe reads it, unless it would lose something."""
    assert json.loads(encode(MANIFEST))["format_version"] == 6
    assert json.loads(encode(DELETING))["format_version"] == 7
    known = dataclasses.replace(MANIFEST, origin=KNOWN)
    assert json.loads(encode(known))["format_version"] == FORMAT_VERSION == 8
    assert decode_manifest(encode(known), "x") == known
    assert known.files[-1] == known.linked[-1] == known.known_rows == FileEntry(**KNOWN["known_rows"])
    for value in ({"name": "known-rows.npy"}, 7, {**KNOWN["known_rows"], "name": "../x.npy"}):
        with pytest.raises(InputError, match=r"known_rows|file name"):
            decode_manifest(_signed(json.loads(encode(MANIFEST)) | {"origin": {"known_rows": value}}), "x")


def test_a_manifest_of_an_earlier_version_reads():
    document = json.loads(encode(MANIFEST))
    del document["changes"], document["checksum"]
    assert decode_manifest(_signed({**document, "format_version": 3}), "x") == MANIFEST
    for record in (document, *document["parts"]):
        record.pop("row_sums")
        record.pop("checksum", None)
    assert decode_manifest(_signed({**document, "format_version": 2}), "x") == MANIFEST
    del document["arithmetic"]
    assert decode_manifest(_signed({**document, "format_version": 1}), "x") == MANIFEST
    with pytest.raises(InputError, match="missing field arithmetic"):
        decode_manifest(_signed(document), "x")


@given(st.floats() | st.integers() | st.text(), st.text())
def test_progress_reads_back_exactly(value, key):
    part = decode_part(encode(dataclasses.replace(PART, progress={key: value})), "x")
    found = part.progress[key]
    assert type(found) is type(value)
    assert found == value or math.isnan(found)


def test_values_without_json_are_not_written():
    with pytest.raises(ValueError, match="expected a JSON value"):
        encode(dataclasses.replace(PART, progress={"x": object()}))


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (("format_version",), NEWER, f"format version {NEWER}, this bagpipe reads versions up to {FORMAT_VERSION}"),
        (("format_version",), 0, f"format_version: expected 1 to {FORMAT_VERSION}, got 0"),
        (("format_version",), True, "format_version: expected an integer"),
        (("format_version",), "1", "format_version: expected an integer, got '1'"),
        (("step",), None, "missing field step"),
        (("color",), "red", "unknown field color"),
        (("step",), -1, "step: expected 0 or more, got -1"),
        (("step",), 4, "ascending steps up to 4"),
        (("step",), 5.0, "step: expected an integer, got '5.0'"),
        (("lineage",), "abc", "lineage: expected 32 hexadecimal digits"),
        (("token",), "abc", "token: expected a token"),
        (("world_size",), 2, "parts: expected ranks 0 to 1"),
        (("parts", 0, "rank"), 1, r"parts: expected ranks 0 to 0, got \[1\]"),
        (("parts", 0, "dense"), [], r"parts\[0\]\.dense: expected an object"),
        (("parts", 0, "dense", "name"), "../../etc/passwd.npy", "is not a checkpoint file name"),
        (("parts", 0, "dense", "name"), "x.pkl", "is not a checkpoint file name"),
        (("parts", 0, "dense", "name"), "dirty.npy", "a file is listed twice"),
        (("parts", 0, "dense", "xxh3_128"), "0", "expected 32 hexadecimal digits"),
        (("parts", 0, "rows", 0, "full"), 1, r"parts\[0\]\.rows\[0\]\.full: expected true or false"),
        (("parts", 0, "rows", 0, "num_rows"), 0, "has no rows"),
        (
            ("base", 0),
            {**dataclasses.asdict(row_file("x.npy", 4)), "row_bytes": 0, "full": True},
            "'x.npy' has deletions, which are never all rows",
        ),
        (("parts", 0, "num_groups"), "12", r"num_groups: expected a list"),
        (("parts", 0, "num_groups"), [1, "2"], r"num_groups\[1\]: expected an integer"),
        (("row_sums",), [1, 2, 3], "row_sums: expected one for each bucket, a power of two, got 3"),
        (("row_sums",), [1, -2], r"row_sums\[1\]: expected 0 or more"),
        (("parts", 0, "row_sums"), [0.5], r"row_sums\[0\]: expected an integer"),
        (("identity",), [1], "identity: expected an object"),
        (("world_size",), 10**20, "parts: expected ranks 0 to 99999999999999999999"),
        (("row_schema",), {}, "row schema: missing field"),
        (("row_schema", "tables"), 5, "row schema: tables: expected a list, got '5'"),
        (("row_schema", "tables"), [{"name": 5, "dim": 2}], r"row schema: tables\[0\]\.name: expected a text"),
        (("row_schema", "optimizer"), "magic", "optim.rows must be one of"),
        (
            ("parts", 0, "progress"),
            {"reader_state": 5},
            r"parts\[0\].progress.reader_state: expected an object, got '5'",
        ),
        (("origin",), {"takings": 5}, "origin.takings: expected an object, got '5'"),
        (("settings",), [1], "settings: expected an object"),
        (("arithmetic",), {"device": "cpu"}, "arithmetic: expected a list"),
        (("arithmetic",), [{"device": 1}], r"arithmetic\[0\]: expected an object"),
        (("base", 0, "step"), 9, "ascending steps"),
    ],
)
def test_a_foreign_manifest_is_refused_in_one_line(path, to, said):
    with pytest.raises(InputError, match=said) as caught:
        decode_manifest(changed(MANIFEST, *path, to=to), "manifest.json")
    assert not isinstance(caught.value, BrokenCheckpoint)
    assert str(caught.value).startswith("manifest.json: ")
    assert "\n" not in str(caught.value)


def test_another_files_content_makes_a_manifest_broken():
    with pytest.raises(BrokenCheckpoint, match="expected a manifest"):
        decode_manifest(encode(PART), "manifest.json")


def test_a_part_names_files_of_its_folder_only():
    with pytest.raises(InputError, match="is not a checkpoint file name"):
        decode_part(changed(PART, "dirty", "name", to="/etc/x.npy"), "part.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"a": 1, "a": 1}',
        b"1" * 5000,
        encode(MANIFEST)[:-9],
        encode(MANIFEST).replace(b'"step": 5', b'"step": 6'),
        encode(MANIFEST).replace(b'"format_version": 6', f'"format_version": {NEWER}'.encode()),
    ],
)
def test_damage_is_reported_as_damage(content):
    with pytest.raises(BrokenCheckpoint):
        decode_manifest(content, "manifest.json")


def test_fields_of_a_manifest_are_all_read():
    """A new field that the reader ignores would be refused here."""
    assert {field.name for field in dataclasses.fields(Manifest)} == json.loads(encode(MANIFEST)).keys() - {"checksum"}
