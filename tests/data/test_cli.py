from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from data.cli import main
from data.loader import LookaheadLoader
from data.parquet import ParquetSource
from data.testing import assert_same_batches, read_all


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
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_runs_as_a_module(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "data", "synth", "--rows", "10", "--out", str(tmp_path / "a.tsv")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "10 rows" in done.stdout
    assert done.stderr == ""
