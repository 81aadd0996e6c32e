"""full(A) + delta(A to B) = full(B), byte for byte; another base, or a damaged one, is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError
from bagpipe.serving.apply import apply_delta
from bagpipe.serving.delta import DELTA, DELTA_FILE, Base, FolderBase, SourceBase, read_delta, write_delta
from bagpipe.serving.tensor_file import TensorFile
from bagpipe.store.interface import DeleteRequest
from tests.serving.exports import SCHEMA, content, exported, pair_of, source_of, store_of, write_rows


def delta_of(source, base: Base, folder: Path) -> Path:
    folder.mkdir()
    write_delta(source, base, folder)
    return folder


@pytest.mark.parametrize(("precision", "states"), [("exact", True), ("fp16", True), ("int8", False)])
@pytest.mark.parametrize(("before", "between"), [(30, 20), (0, 9), (25, 0)])
def test_a_base_and_its_delta_are_the_next_export(
    precision, states: bool, before: int, between: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(before)
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, random, before)
        first = exported(source_of(store, 10, precision, states=states), tmp_path / "A")
        deltas = {}
        earlier = {number: store.read(number, store.ids(number)) for number in range(len(SCHEMA.tables))}
        ids = {number: store.ids(number) for number in earlier}
        with store_of(f"{tmp_path}".replace("/", "-") + "-before") as copy:
            copy.claim()
            for number, rows in earlier.items():
                copy.write(number, ids[number], rows.rows)
            write_rows(store, random, between)
            source = source_of(store, 20, precision, states=states)
            bases = {
                "folder": FolderBase(first),
                "source": SourceBase(source_of(copy, 10, precision, states=states)),
            }
            for name, base in bases.items():
                deltas[name] = delta_of(source, base, tmp_path / name)
        full = exported(source, tmp_path / "B")
    assert content(deltas["folder"]) == content(deltas["source"])
    apply_delta(first, deltas["folder"], tmp_path / "applied")
    assert content(tmp_path / "applied") == content(full)
    written = read_delta(deltas["folder"])
    assert all(count <= between for count in written.num_rows.values())
    assert between == 0 or any(written.num_rows.values())
    if not between:
        assert set(written.num_rows.values()) == {0}


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_deleted_rows_are_gone_after_a_delta(precision, tmp_path: Path) -> None:
    """Of tables with and without a bound; all rows of one table, and of another one none."""
    random = np.random.default_rng(4)
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, random, 40)
        first = exported(source_of(store, 10, precision), tmp_path / "A")
        user, item, shop = (store.ids(number) for number in range(3))
        store.delete_many([DeleteRequest(0, user[::3]), DeleteRequest(1, item[::2]), DeleteRequest(2, shop)])
        write_rows(store, random, 5)
        gone = [np.setdiff1d(before, store.ids(number)) for number, before in ((0, user), (2, shop))]
        delta = delta_of(source_of(store, 20, precision), FolderBase(first), tmp_path / "delta")
        full = exported(source_of(store, 20, precision), tmp_path / "B")
    apply_delta(first, delta, tmp_path / "applied")
    assert content(tmp_path / "applied") == content(full)
    assert read_delta(delta).num_deleted == {"user": len(gone[0]), "shop": len(gone[1])}
    assert TensorFile(delta / DELTA_FILE).words("deleted:user").tolist() == gone[0].tolist()
    assert json.loads((delta / DELTA).read_text())["format_version"] == 2


def test_a_delta_without_deleted_rows_is_of_the_first_version(pair: tuple[Path, Path]) -> None:
    value = json.loads((pair[1] / DELTA).read_text())
    assert value["format_version"] == 1
    assert "num_deleted" not in value


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return pair_of(tmp_path)


def test_what_is_no_base_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = pair
    with store_of(f"{tmp_path}".replace("/", "-") + "-other") as store:
        store.claim()
        with pytest.raises(InputError, match="differs in its precision: it has exact, this export int8"):
            delta_of(source_of(store, 30, "int8"), FolderBase(base), tmp_path / "coded")
        source = source_of(store, 30)
        other = dataclasses.replace(source.manifest, rows=dataclasses.replace(SCHEMA, seed=8))
        with pytest.raises(InputError, match="differs in its rows"):
            delta_of(dataclasses.replace(source, manifest=other), FolderBase(base), tmp_path / "seed")


def test_a_delta_of_another_version_is_refused(pair: tuple[Path, Path]) -> None:
    path = pair[1] / DELTA
    value = json.loads(path.read_text())
    for changed, words in (
        ({"format_version": 9}, "format version 9"),
        ({"kind": "x"}, "expected a delta"),
        ({"file": {}}, "is no whole delta"),
    ):
        path.write_text(json.dumps({**value, **changed}))
        with pytest.raises(InputError, match=words):
            read_delta(pair[1])
