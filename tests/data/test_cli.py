from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from data.arrow_files import open_arrow
from data.cli import main
from data.loader import LookaheadLoader
from data.next_use_mark import NextUseMark
from data.parquet import ParquetSource
from data.testing import assert_same_batches, read_all
from tests.data.files import avazu_csv, avazu_row, save_to_disk, write_examples


def run(*arguments: str) -> str:
    out = io.StringIO()
    assert main(arguments, out) == 0
    return out.getvalue()


def batches(path: Path) -> list[object]:
    return list(read_all(LookaheadLoader(ParquetSource.at(str(path)), batch_size=32)))


def test_synth_and_convert_agree(tmp_path: Path) -> None:
    text, direct, converted = tmp_path / "new" / "a.tsv.gz", tmp_path / "a.arrow", tmp_path / "b.parquet"
    assert ": 100 rows, " in run("synth", "--out", str(text), "--rows", "100", "--seed", "4")
    run("synth", "--out", str(direct), "--rows", "100", "--seed", "4")
    assert ": 100 rows, " in run("convert", str(text), str(converted))
    assert_same_batches(batches(converted), batches(direct))  # type: ignore[arg-type]


def test_named_times_are_kept_and_fixed_ones_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "s.toml"
    schema.write_text('time = "at"\n[synthetic]\nrows = 50\nrows_per_day = 5\ntables = 2\n')
    made, again, parts = tmp_path / "made.parquet", tmp_path / "again.arrow", tmp_path / "parts"
    run("synth", "--out", str(made), "--schema", str(schema))
    run("convert", str(made), str(again), "--next-use")
    run("convert", str(again), str(parts), "--jobs", "1")
    sources = [ParquetSource.at(str(path)).with_times() for path in (made, again, parts)]
    first, *others = [read_all(LookaheadLoader(source, batch_size=32)) for source in sources]
    days = set[int]()
    for batch in first:
        assert batch.times_s is not None
        days.update((batch.times_s // 86_400).tolist())
    assert len(days) == 10
    for other in others:
        assert_same_batches(other, first)
    text, plain, timed = tmp_path / "a.csv", tmp_path / "plain.arrow", tmp_path / "timed.arrow"
    text.write_bytes(avazu_csv([avazu_row(), avazu_row(hour="")]))
    run("convert", str(text), str(plain))
    assert ParquetSource.at(str(plain)).clock is None
    assert main(["convert", str(text), str(timed), "--times"]) == 2
    assert "a.csv:3: expected an hour as YYMMDDHH in hour (column 3), got ''" in capsys.readouterr().err
    run("convert", str(text), str(timed), "--times", "--bad-rows", "skip")
    (batch,) = read_all(LookaheadLoader(ParquetSource.at(str(timed)).with_times(), batch_size=2))
    assert batch.times_s is not None
    assert batch.times_s.tolist() == [1_413_932_400]  # 2014-10-21 23:00 UTC


def test_a_folder_with_times_is_another_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_bytes(avazu_csv([avazu_row()]))
    command = ["convert", str(tmp_path / "a.csv"), str(tmp_path / "out"), "--jobs", "1"]
    run(*command)
    assert main([*command, "--times"]) == 2
    assert "times" in capsys.readouterr().err
    run(*command, "--times", "--redo")
    assert ParquetSource.at(str(tmp_path / "out")).clock is not None
    run("synth", "--out", str(tmp_path / "a.tsv"), "--rows", "5")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "a.tsv"), str(tmp_path / "a.arrow"), "--times"]) == 2
    said = capsys.readouterr().err.partition("\n")[2]  # after the format
    assert said.startswith("error: --times needs a clock: expected a column of times in the schema (key time), or ")
    assert said.endswith("got none for format criteo-tsv\n")


def test_synth_options(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    run("synth", "--out", str(path), "--rows", "50", "--tables", "3", "--profile", "criteo-kaggle")
    assert len(ParquetSource.at(str(path)).schema.tables) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synth", "--out", "a.csv"], "--out must end in .tsv, .tsv.gz, .arrow or .parquet, got 'a.csv'"),
        (["synth", "--out", "a.arrow", "--rows", "0"], "synthetic rows must be at least 1, got 0"),
        (["convert", "missing", "a.arrow"], "data.path missing: no such file or folder"),
        (["convert", "missing", "a.arrow", "--limit", "-1"], "--limit must be at least 0, got -1"),
        (
            ["convert", "a", "b.arrow", "--shuffle-seed", "x"],
            "argument --shuffle-seed: invalid int value: 'x' (--help lists the options)",
        ),
        (["convert", "a"], "the following arguments are required: out (--help lists the options)"),
        (["convert", "a", "b.arrow", "--memory", "2GiB"], "--memory needs --next-use"),
        (["convert", "a", "b.arrow", "--eval-fraction", "0"], "--eval-fraction needs --next-use"),
        (["convert", "a", "b.arrow", "--epochs", "2"], "--epochs needs --next-use"),
        (
            ["convert", "a", "b.arrow", "--next-use", "--shuffle-seed=-1"],
            "--shuffle-seed must be from 0 to 2**63 - 1, as run.seed, got -1",
        ),
        (["convert", "missing", "a", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["convert", "missing", "a", "--part-segments", "0"], "--part-segments must be at least 1, got 0"),
        (
            ["convert", "a", "b", "c", "--dictionaries", "first"],
            "--dictionaries reads one file or folder: build them for all the data in one folder",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_folder_is_read_as_its_inputs(tmp_path: Path) -> None:
    for number in range(2):
        run("synth", "--out", str(tmp_path / f"{number}.tsv"), "--rows", "50", "--seed", str(number))
    one, several = tmp_path / "one.arrow", tmp_path / "several"
    run("convert", str(tmp_path / "0.tsv"), str(tmp_path / "1.tsv"), str(several), "--jobs", "1", "--form", "arrow")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(2):
        (tmp_path / f"{number}.tsv").rename(texts / f"{number}.tsv")
    run("convert", str(texts), str(one))
    assert_same_batches(batches(several), batches(one))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.tsv", "out.arrow", "--jobs", "2"], "--jobs: needs a folder to write, got the name of a file, 'out.arrow'"),
        (
            ["a.tsv", "a.tsv", "o.parquet"],
            "several paths: needs a folder to write, got the name of a file, 'o.parquet'",
        ),
        (["a.tsv", "out.csv"], "expected a file name ending in .arrow or .parquet, or a folder (a new one whose name "),
    ],
)
def test_outputs_that_do_not_fit(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("synth", "--out", "a.tsv", "--rows", "5")
    assert main(["convert", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")


def test_a_folder_is_annotated(tmp_path: Path) -> None:
    for name in "ab":
        run("synth", "--out", str(tmp_path / f"{name}.tsv"), "--rows", "50")
    inputs, out = [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")], tmp_path / "out"
    assert ": 100 rows, " in run("convert", *inputs, str(out), "--next-use", "--jobs", "1", "--eval-fraction", "0.5")
    assert sorted(path.name for path in out.iterdir()) == [
        "_conversion.jsonl",
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    assert "2 files, 2 of them kept" in run("convert", *inputs, str(out), "--next-use", "--eval-fraction", "0.5")
    mark = NextUseMark.of("", open_arrow(str(out / "part-00001.parquet")).schema.metadata)
    assert mark is not None
    assert (mark.file, mark.num_files, mark.rows, mark.num_rows, mark.train_rows) == (1, 2, 50, 100, 50)


def test_runs_as_a_module(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "data", "synth", "--rows", "10", "--out", str(tmp_path / "a.tsv")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "10 rows" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("form", ["parquet", "arrow", "huggingface", "csv", "tfrecord"])
def test_names_of_files_need_not_be_utf_8(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file that is read or written, and every folder."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    schema, path = str(folder / os.fsdecode(b"\xe9.toml")), folder / os.fsdecode(b"in\xe9")
    Path(schema).write_text('label = "y"\nsparse = ["user", "city"]\n[tables.city]\nstrings = "dictionary"\n')
    table = pa.table({"y": [1, 0, 1, 1], "user": [7, 8, 7, 9], "city": ["Rome", "Oslo", "Rome", "Rome"]})
    if form == "huggingface":
        save_to_disk(table, path)
    elif form == "csv":
        lines = zip(*table.to_pydict().values(), strict=True)
        path.write_text("y,user,city\n" + "".join(f"{y},{user},{city}\n" for y, user, city in lines))
    elif form == "tfrecord":
        write_examples(path, table.to_pylist())
    else:
        write = pq.write_table if form == "parquet" else pyarrow.feather.write_feather
        with path.open("wb") as file:
            write(table, file)
    flags = ["--format", "parquet" if form == "arrow" else form, "--schema", schema]
    dictionaries, next_use = ["--dictionaries", "first"], ["--next-use"]
    for name, more in (("a.arrow", dictionaries), ("a.parquet", next_use), ("parts", next_use)):
        out = run("convert", str(path), str(folder / name), *flags, *more)
        assert out.startswith(f"{tmp_path}/caf\\udce9/{name}: 4 rows, ")
    assert_same_batches(batches(folder / "parts"), batches(folder / "a.arrow"))  # type: ignore[arg-type]
    assert_same_batches(batches(folder / "a.parquet"), batches(folder / "a.arrow"))  # type: ignore[arg-type]
    other = str(tmp_path / os.fsdecode(b"\xe9"))
    outputs = [f"--{kind}={other}.{kind}" for kind in ("json", "csv", "report")]
    told = run("replay", "--data.path", str(folder / "a.parquet"), "--data.batch_size", "2", *outputs)
    assert told.startswith(f"{tmp_path}/caf\\udce9/a.parquet: 4 examples")
    assert main(["convert", str(folder / os.fsdecode(b"no\xe9")), "out.arrow"]) == 2
    assert capsys.readouterr().err.endswith("no\\udce9: no such file or folder\n")
