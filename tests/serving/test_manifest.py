from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.serving.manifest import MANIFEST, Column, ExportFile, ExportManifest, TableFiles, read_manifest
from tests.serving.exports import DATA, SCHEMA

MADE = ExportManifest(
    step=7,
    checkpoint="lineage:token:7",
    rows=SCHEMA,
    data=DATA,
    columns=(Column(name="user", feature="user", table="user", pooling="sum", weighted=False, dim=3),),
    program=False,
    no_program="why",
    tables=(TableFiles(name="user", weight="w", ids=None, dtype="float32"),),
    settings={"model.name": "dlrm", "model.top_mlp": [4, 2]},
    versions={"torch": "2.13.0"},
    files={"file": ExportFile(num_bytes=3, sha256="00", tensors={"w": "11"})},
)


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(MADE.encode())
    (tmp_path / "file").write_bytes(b"abc")
    found = read_manifest(tmp_path)
    assert found == MADE
    assert found.encode() == MADE.encode()
    assert found.table_of("user").weight == "w"
    with pytest.raises(KeyError):
        found.table_of("item")
    (tmp_path / "file").write_bytes(b"ab")
    with pytest.raises(InputError, match=r"file: expected 3 bytes, got 2"):
        read_manifest(tmp_path)


def test_other_manifests_are_refused_in_one_line() -> None:
    value = json.loads(MADE.encode())
    lacking = {name: item for name, item in value.items() if name != "columns"}
    for other, words in (
        ([], "expected the manifest of an export"),
        ({**value, "kind": "x"}, "expected the manifest of an export"),
        ({**value, "format_version": 2}, "has format version 2"),
        ({**value, "initial_rows": {"rule": "zeros"}}, "have rule 'zeros'"),
        ({**value, "columns": [{"nme": 1}]}, "lacks a field, or has another"),
        (lacking, "lacks a field, or has another"),
    ):
        with pytest.raises(InputError, match=words):
            ExportManifest.decode(other, Path("m"))
    assert dataclasses.replace(MADE, step=8).encode() != MADE.encode()
