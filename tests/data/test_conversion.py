"""Folders of parts: equal whatever the number of processes, continued after signals."""

from __future__ import annotations

import dataclasses
import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.conversion import Conversion, convert_folder
from data.conversion_manifest import MANIFEST, PartRecord
from data.criteo import CriteoSource
from data.formats import open_source
from data.loader import LookaheadLoader
from data.parquet import ParquetSource
from data.testing import assert_same_batches, read_all
from tests.data.files import criteo_line, criteo_lines

ROOT = Path(__file__).parents[2]

#: Runs the command, and sends itself a signal as soon as the first part is finished.
DYING = """
import os, signal, sys
from data.cli import main
from data.conversion_manifest import ConversionManifest

number, add = int(sys.argv[1]), ConversionManifest.add

def dying(self, record):
    add(self, record)
    os.kill(os.getpid(), number)

ConversionManifest.add = dying
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[2:]))
"""


def unwatched(records: Iterable[PartRecord], total: int) -> Iterable[PartRecord]:
    return records


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two plain files and a compressed one."""
    folder = tmp_path_factory.mktemp("days")
    (folder / "day_0.tsv").write_bytes(criteo_lines(200, seed=0))
    (folder / "day_1.tsv.gz").write_bytes(gzip.compress(criteo_lines(100, seed=1), mtime=0))
    (folder / "day_10.tsv").write_bytes(criteo_lines(150, seed=2))
    return folder


def source_of(path: Path) -> CriteoSource:
    """With blocks of some 40 lines."""
    source = open_source(DataConfig(path=str(path), format="criteo-tsv"))
    assert isinstance(source, CriteoSource)
    return dataclasses.replace(source, block_bytes=8_000)


def converted(days: Path, folder: Path, **options: object) -> tuple[PartRecord, ...]:
    values = {"part_segments": 2, "form": "arrow", **options}
    return convert_folder(Conversion(sources=(source_of(days),), folder=folder, **values), unwatched)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted by one process."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    converted(days, folder)
    return folder


@pytest.mark.multiproc
@pytest.mark.parametrize("jobs", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(days: Path, whole: Path, tmp_path: Path, jobs: int) -> None:
    converted(days, tmp_path / "out", jobs=jobs)
    assert content(tmp_path / "out") == content(whole)


def test_the_parts_hold_the_rows_in_order(days: Path, whole: Path) -> None:
    parts = list(read_all(LookaheadLoader(ParquetSource.at(str(whole)), batch_size=32)))
    text = list(read_all(LookaheadLoader(source_of(days), batch_size=32)))
    assert_same_batches(parts, text)
    assert len(content(whole)) > 5


def test_a_part_holds_segments_of_one_file(days: Path, tmp_path: Path) -> None:
    records = converted(days, tmp_path / "out", part_segments=1000)
    assert [record.rows for record in records] == [200, 100, 150]


@pytest.mark.parametrize(("limit", "rows"), [(1, [1]), (200, [200]), (230, [200, 30]), (1000, [200, 100, 150])])
def test_a_limit_counts_rows_of_all_files(days: Path, tmp_path: Path, limit: int, rows: list[int]) -> None:
    records = converted(days, tmp_path / "out", part_segments=1000, limit=limit)
    assert [record.rows for record in records] == rows


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_lines(10) + b"bad\n" + criteo_lines(5))
    source = dataclasses.replace(source_of(tmp_path / "a.tsv"), bad_rows="skip")
    (record,) = convert_folder(Conversion(sources=(source,), folder=tmp_path / "out"), unwatched)
    assert (record.rows, record.skipped) == (15, 1)


def test_whole_parts_are_kept_and_others_are_made_again(days: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(days, out)
    first, second, third = sorted(out.glob("part-*"))[:3]
    damaged = bytearray(first.read_bytes())
    damaged[100] ^= 1
    first.write_bytes(damaged)
    second.unlink()
    manifest = out / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-20])  # torn: the last part is not noted
    (out / f"{third.name}.partial").write_bytes(b"begun")
    kept = [record.is_kept for record in converted(days, out)]
    (out / f"{third.name}.partial").unlink()
    assert kept == [False, False, *[True] * (len(kept) - 3), False]
    assert content(out) == content(whole)
    assert all(record.is_kept for record in converted(days, out))


def test_another_conversion_is_refused_or_replaced(days: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(days, out, limit=230)
    with pytest.raises(InputError, match=r"out: holds another conversion: its limit was 230, expected 0; name another"):
        converted(days, out)
    converted(days, out, redo=True)
    assert content(out) == content(whole)


def test_a_changed_input_is_refused_by_name(tmp_path: Path) -> None:
    text, out = tmp_path / "a.tsv", tmp_path / "out"
    text.write_bytes(criteo_lines(20))
    converted(text, out)
    text.write_bytes(criteo_lines(21))
    with pytest.raises(InputError, match=r"holds another conversion: \S+a\.tsv was \d+ bytes, .*, and is \d+ bytes"):
        converted(text, out)


def test_an_input_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.tsv"
    text.write_bytes(criteo_lines(20))

    def changing(records: Iterable[PartRecord], total: int) -> Iterable[PartRecord]:
        yield from records
        os.utime(text, ns=(1, 1))

    source = source_of(text)
    with pytest.raises(InputError, match=r"a\.tsv changed while it was converted: it was"):
        convert_folder(Conversion(sources=(source,), folder=tmp_path / "out"), changing)


def test_sources_must_have_the_same_columns(days: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    schema.write_text("[tables.C1]\nrows = 10\nhash = true\n")
    other = open_source(DataConfig(path=str(days), format="criteo-tsv", schema=str(schema)))
    with pytest.raises(InputError, match="expected the columns of"):
        convert_folder(Conversion(sources=(source_of(days), other), folder=tmp_path / "out"), unwatched)


@pytest.mark.multiproc
def test_a_bad_row_in_a_process_is_one_line(tmp_path: Path) -> None:
    for number, text in enumerate((criteo_lines(5), criteo_line("7") + b"\n")):
        (tmp_path / f"{number}.tsv").write_bytes(text)
    with pytest.raises(InputError, match=r"1\.tsv:1: expected"):
        converted(tmp_path, tmp_path / "out", jobs=2)
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("number", "jobs", "status", "said"),
    [(signal.SIGKILL, 1, -signal.SIGKILL, ""), (signal.SIGINT, 1, 130, "interrupted\n"),
     (signal.SIGINT, 2, 130, "interrupted\n")],
)  # fmt: skip
def test_a_conversion_goes_on_after_a_signal(
    days: Path, tmp_path: Path, number: int, jobs: int, status: int, said: str
) -> None:
    def run(code: list[str], out: Path, jobs: int) -> subprocess.CompletedProcess[str]:
        words = ["convert", str(days / "day_0.tsv"), str(days / "day_1.tsv.gz"), str(days / "day_10.tsv"), str(out)]
        command = [sys.executable, *code, *words, "--jobs", str(jobs), "--format", "criteo-tsv"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)

    out, script = tmp_path / "out", tmp_path / "dying.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DYING}", encoding="utf-8")
    died = run([str(script), str(int(number))], out, jobs)
    assert (died.returncode, died.stderr) == (status, said)
    assert not list(out.glob("*.partial"))
    assert len((out / MANIFEST).read_bytes().splitlines()) == 2
    done = run(["-m", "data"], out, 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "450 rows" in done.stdout
    assert "3 files, " in done.stdout
    assert "of them kept" in done.stdout
    again = run(["-m", "data"], tmp_path / "again", 1)
    assert again.returncode == 0
    assert content(out) == content(tmp_path / "again")
