"""Folders of annotated parts: equal whatever the number of processes, continued after an interruption."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.conversion import Conversion, convert_folder
from data.conversion_manifest import MANIFEST, PLAIN, PartRecord
from data.criteo import CriteoSource
from data.formats import open_source
from data.next_use_folder import convert_annotated
from data.next_use_source import told_source
from data.next_use_writer import NextUseOrder, write_annotated
from tests.data.files import criteo_lines
from tests.data.next_uses import check_next_uses, told_batches

ORDER = NextUseOrder(eval_fraction=0.1)


def unwatched(records: Iterable[PartRecord], total: int) -> Iterable[PartRecord]:
    return records


def stopping(records: Iterable[PartRecord], total: int) -> Iterable[PartRecord]:
    """The first record, then Ctrl-C."""
    for record in records:
        yield record
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    for number, lines in enumerate((200, 100, 150)):
        (folder / f"day_{number}.tsv").write_bytes(criteo_lines(lines, seed=number))
    return folder


def source_of(path: Path) -> CriteoSource:
    """With blocks of some 40 lines."""
    source = open_source(DataConfig(path=str(path), format="criteo-tsv"))
    assert isinstance(source, CriteoSource)
    return dataclasses.replace(source, block_bytes=8_000)


def conversion_of(days: Path, folder: Path, **options: Any) -> Conversion:
    sources = (source_of(days / "day_0.tsv"), source_of(days / "day_1.tsv"), source_of(days / "day_2.tsv"))
    return Conversion(sources=sources, folder=folder, part_segments=2, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Annotated by one process and thread."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    records = convert_annotated(conversion_of(days, folder), ORDER, unwatched, unwatched)
    assert sum(record.rows for record in records) == 450
    assert [record.part for record in records] == sorted(path.name for path in folder.glob("part-*"))
    assert len(records) > 5
    return folder


def config_of(path: Path, **options: Any) -> DataConfig:
    values: dict[str, Any] = {"batch_size": 32, "eval_fraction": 0.1, "epochs": 2, **options}
    return DataConfig(path=str(path), format="parquet", **values)


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    for batch, other in zip(batches, others, strict=True):
        np.testing.assert_array_equal(batch.values, other.values)
        np.testing.assert_array_equal(batch.next_use, other.next_use)


def test_a_folder_tells_the_next_uses_of_one_file(days: Path, whole: Path, tmp_path: Path) -> None:
    batches = told_batches(config_of(whole))
    check_next_uses(batches, range(26))
    write_annotated(source_of(days), str(tmp_path / "one.arrow"), ORDER)
    assert_same(batches, told_batches(config_of(tmp_path / "one.arrow")))


@pytest.mark.multiproc
def test_processes_and_threads_write_the_same_bytes(days: Path, whole: Path, tmp_path: Path) -> None:
    order = dataclasses.replace(ORDER, threads=3)
    convert_annotated(conversion_of(days, tmp_path / "out", jobs=2), order, unwatched, unwatched)
    assert content(tmp_path / "out") == content(whole)


def test_shuffled_epochs_of_a_folder_tell_the_true_next_uses(days: Path, tmp_path: Path) -> None:
    order = NextUseOrder(eval_fraction=0.1, seed=3, epochs=2)
    convert_annotated(conversion_of(days, tmp_path / "out", form="arrow"), order, unwatched, unwatched)
    check_next_uses(told_batches(config_of(tmp_path / "out", shuffle=True), seed=3), range(26))


@pytest.mark.parametrize("phase", ["plain", "annotated"])
def test_an_interrupted_conversion_goes_on(days: Path, whole: Path, tmp_path: Path, phase: str) -> None:
    out = tmp_path / "out"
    conversion = conversion_of(days, out)
    watches = (stopping, unwatched) if phase == "plain" else (unwatched, stopping)
    with pytest.raises(KeyboardInterrupt):
        convert_annotated(conversion, ORDER, *watches)
    with pytest.raises(InputError, match="its conversion has not ended"):
        open_source(config_of(out))
    seen: list[bool] = []

    def watch(records: Iterable[PartRecord], total: int) -> Iterable[PartRecord]:
        for record in records:
            seen.append(record.is_kept)
            yield record

    records = convert_annotated(conversion, ORDER, watch, unwatched)
    assert seen.count(True) == (1 if phase == "plain" else len(seen))
    assert sum(record.is_kept for record in records) == (phase == "annotated")
    assert content(out) == content(whole)
    assert all(record.is_kept for record in convert_annotated(conversion, ORDER, unwatched, unwatched))
    assert content(out) == content(whole)


def test_a_damaged_part_is_made_again(days: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "part-00002.parquet").write_bytes(b"PAR1")
    records = convert_annotated(conversion_of(days, out), ORDER, unwatched, unwatched)
    assert [record.is_kept for record in records].count(False) == 1
    assert content(out) == content(whole)


def test_plain_and_annotated_conversions_do_not_mix(days: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert_annotated(conversion_of(days, out), ORDER, stopping, unwatched)
    with pytest.raises(
        InputError, match=r"holds another conversion: its next uses was \['0.1', None, 1\], expected None"
    ):
        convert_folder(conversion_of(days, out), unwatched)
    with pytest.raises(InputError, match=r"its next uses was \['0.1', None, 1\], expected \['0.0', None, 1\]"):
        convert_annotated(conversion_of(days, out), NextUseOrder(), unwatched, unwatched)
    convert_folder(conversion_of(days, out, redo=True), unwatched)
    assert not (out / PLAIN).exists()


def test_parts_that_are_missing_or_foreign_are_refused(days: Path, whole: Path, tmp_path: Path) -> None:
    def told(name: str) -> None:
        config = config_of(tmp_path / name)
        told_source(open_source(config), config, 0)

    others = conversion_of(days, tmp_path / "others")
    convert_annotated(dataclasses.replace(others, sources=others.sources[:1]), ORDER, unwatched, unwatched)
    for name in ("missing", "extra", "foreign"):
        shutil.copytree(whole, tmp_path / name)
    told("foreign")
    (tmp_path / "missing" / "part-00003.parquet").unlink()
    with pytest.raises(InputError, match=r"this is file 1 of \d+ annotated ones, got it as file 1 of \d+"):
        told("missing")
    shutil.copy(whole / "part-00000.parquet", tmp_path / "extra" / "part-99999.parquet")
    with pytest.raises(InputError, match=r"this is file 1 of \d+ annotated ones, got it as file 1 of \d+"):
        told("extra")
    shutil.copy(tmp_path / "others" / "part-00001.parquet", tmp_path / "foreign" / "part-00001.parquet")
    with pytest.raises(InputError, match=r"part-00001.parquet: the next uses are of another run of convert"):
        told("foreign")


def test_a_limit_and_a_part_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_lines(50))
    (tmp_path / "b.tsv").write_bytes(b"bad\n")
    (tmp_path / "c.tsv").write_bytes(criteo_lines(50, seed=1))
    sources = tuple(dataclasses.replace(source_of(tmp_path / f"{name}.tsv"), bad_rows="skip") for name in "abc")
    conversion = Conversion(sources=sources, folder=tmp_path / "out", limit=80)
    records = convert_annotated(conversion, NextUseOrder(), unwatched, unwatched)
    assert [(record.rows, record.skipped) for record in records] == [(50, 0), (0, 1), (29, 0)]
    check_next_uses(told_batches(config_of(tmp_path / "out", eval_fraction=0.0)), range(26))
    assert (tmp_path / "out" / MANIFEST).exists()


def test_a_part_that_a_damaged_manifest_does_not_name_is_made_again(days: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    lines = (out / MANIFEST).read_bytes().splitlines(keepends=True)
    (out / MANIFEST).write_bytes(b"".join([lines[0], b"?" + lines[1][1:], *lines[2:]]))
    (out / "part-00000.parquet").unlink()
    convert_annotated(conversion_of(days, out), ORDER, unwatched, unwatched)
    for path in whole.glob("part-*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
