from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.replay.cli import _unwinding
from data.replay.options import Sweep
from data.replay.records import Replay, ReplayRecord, Setting
from data.replay.sweep import replay
from tests.data.replay.logs import run_replay, write_log

ROOT = Path(__file__).parents[3]

FLAGS = ("--data.format", "parquet", "--data.batch_size", "60", "--policy", "belady-window,lru", "--lookahead", "1,4")


def test_table_json_and_report(tmp_path: Path) -> None:
    log, out, page = write_log(tmp_path), tmp_path / "out.json", tmp_path / "out.html"
    flags = (*FLAGS, "--cache_rows", "400,600")
    code, text = run_replay("--data.path", log, *flags, "--json", out, "--report", page)
    assert code == 0
    records = json.loads(out.read_text())
    assert [set(record) for record in records] == [{item.name for item in dataclasses.fields(ReplayRecord)}] * 8
    assert {record["policy"] for record in records} == {"belady-window", "lru"}
    assert "<html" in page.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith(f"{log}: 600 examples, ")
    assert [line.split()[0] for line in lines[3:10]] == ["policy", *["belady-window"] * 4, *["lru"] * 2]
    assert [line.split()[2] for line in lines[8:10]] == ["any", "any"]
    assert lines[-1].startswith("recommended: belady-window with ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_smallest_cache_of_the_whole_log_is_printed(tmp_path: Path, world_size: int) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[cache]\nrows = "auto"\nmax_rows = 7\n')  # the sweep's sizes count
    flags = ("--data.path", write_log(tmp_path), *FLAGS, "--world_size", world_size, "--config", config)
    _, text = run_replay(*flags)
    match = re.search(r"largest batch of 60 examples: (\d+) unique rows, so cache.rows at least (\d+)", text)
    assert match is not None
    least = int(match[2])
    assert least == -(-int(match[1]) // world_size)
    assert run_replay(*flags, "--cache_rows", least)[0] == 0
    assert run_replay(*flags, "--cache_rows", least - 1)[0] == 2


def test_failures_are_marked_and_the_rest_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "9,600", "--json", out, "--report", page)
    code, text = run_replay(*flags)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 4 of 8 settings could not be replayed: batch ")
    assert [record["error"] is None for record in json.loads(out.read_text())] == [False, True] * 4
    assert "failed (4): batch " in text
    assert "recommended: " in text
    assert page.exists()


def test_when_all_fail_nothing_is_recommended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_replay("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "9", "--train")
    assert code == 2
    assert "error: 4 of 4 settings" in capsys.readouterr().err
    assert "recommended" not in text


def test_a_malformed_row_gives_the_readers_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text("\t".join(["1", *["1"] * 13, *["a"] * 26]) + "\n1\t2\n")
    code, _ = run_replay("--data.path", path, "--data.format", "criteo-tsv", "--json", tmp_path / "out.json")
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}:2: ")
    assert not (tmp_path / "out.json").exists()


def test_training_that_fails_is_a_failure_with_all_else_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(recommended: Setting, records: Sequence[ReplayRecord]) -> tuple[Setting, ...]:
        return (dataclasses.replace(recommended, policy="lru"),)

    monkeypatch.setattr("data.replay.cli.trial_settings", refused)
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "600", "--json", out, "--report", page)
    code, text = run_replay(*flags, "--train")
    assert code == 1
    why = "--oracle.policy must be one of belady-window, drop-unused, got 'lru'"
    assert capsys.readouterr().err == f"error: 1 of 1 training runs failed: {why}\n"
    assert f"failed (1): {why}" in text
    assert [record["error"] for record in json.loads(out.read_text())] == [None] * 4
    assert "Training trials" in page.read_text(encoding="utf-8")


def test_the_table_is_printed_if_files_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gone" / "out.json"
    out.parent.mkdir()

    def found_and_gone(sweep: Sweep, *watches: Any) -> Replay:
        out.parent.rmdir()
        return replay(sweep, *watches)

    monkeypatch.setattr("data.replay.cli.replay", found_and_gone)
    code, text = run_replay("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "600", "--json", out)
    assert code == 1
    assert capsys.readouterr().err == f"error: cannot write {out}: No such file or directory\n"
    assert "recommended: " in text


def test_a_missing_chart_library_is_reported_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("data.replay.report", "bagpipe.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, text = run_replay("--data.path", tmp_path / "none", *FLAGS, "--report", tmp_path / "out.html")
    assert (code, text) == (2, "")
    assert "--report needs the Python package plotly" in capsys.readouterr().err


#: Runs the command with two processes, and interrupts it when the first pass is finished.
INTERRUPTED = """
import os, signal, sys
from data.cli import main
from data.replay import cli

def interrupting(outcomes, total):
    for outcome in outcomes:
        os.kill(os.getpid(), int(sys.argv[1]))
        yield outcome

cli._watch_passes = interrupting
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_of_several_processes_leaves_nothing(tmp_path: Path, number: int) -> None:
    script, temporary, out = tmp_path / "script.py", tmp_path / "temporary", tmp_path / "out.json"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{INTERRUPTED}", encoding="utf-8")
    temporary.mkdir()
    words = ["replay", "--data.path", str(write_log(tmp_path)), *FLAGS, "--cache_rows", "450,500,550,600"]
    command = [sys.executable, str(script), str(int(number)), *words, "--jobs", "2", "--json", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ("interrupted\n" if number == signal.SIGINT else "")
    assert not out.exists()
    assert not [path for path in temporary.rglob("*") if path.is_file()]


def test_a_stopped_replay_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, _unwinding():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_runs_as_a_module_with_help() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "data", "replay", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for words in ("python -m data replay", "--lookahead", "--cache_rows", "--data.batch_size", "default: 0.0)"):
        assert words in done.stdout


SAVINGS = ("--thresholds", "1,3", "--limits", "100,1e5", "--data.expire_every", "2")


def test_thresholds_and_limits_are_counted_in_the_passes_over_the_log(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "600", "--data.batch_size", "60,120")
    code, text = run_replay(*flags, "--json", out)
    plain = json.loads(out.read_text())
    code, text = run_replay(*flags, *SAVINGS, "--json", out, "--report", page)
    assert code == 0
    records = json.loads(out.read_text())
    untimed = [{**record, "seconds": 0, "ids_per_s": 0} for record in plain]
    assert [{**record, "seconds": 0, "ids_per_s": 0} for record in records] == [
        {**record, **{name: saved[name] for name in ("thresholds", "limits")}}
        for record, saved in zip(untimed, records, strict=True)
    ]
    first, last = records[0], records[-1]
    assert [each["min_uses"] for each in first["thresholds"]] == [1, 3]
    assert first["thresholds"][0]["total"]["rows"] == first["rows_first_touch"]
    assert set(first["thresholds"][1]["tables"]) == set(first["limits"][0]["tables"]) == {"user", "item"}
    assert first["limits"][0]["total"]["rows_born_anew"] > 0
    assert first["limits"][1]["total"]["rows_at_end"] == first["rows_first_touch"]
    rows, before = first["thresholds"][1]["total"]["rows"], first["thresholds"][1]["total"]["default_share"]
    assert last["thresholds"][1]["total"]["rows"] == rows
    assert last["thresholds"][1]["total"]["default_share"] < before  # a batch that creates a row reads it
    lines = [line.split() for line in text.splitlines()]
    assert ["3", "60", f"{rows:,}"] in [line[:3] for line in lines]
    assert "expire_after: in examples; rows expire before batches 0, 2, … (data.expire_every)" in text
    shown = page.read_text(encoding="utf-8")
    assert 'id="thresholds"' in shown
    assert 'id="limits"' in shown


def test_without_a_policy_the_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def watch(batches: Any, label: str, total: int | None) -> Any:
        passes.append(label)
        return batches

    monkeypatch.setattr("data.replay.cli._watch", watch)
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    flags = ("--data.path", write_log(tmp_path), "--data.format", "parquet", "--policy", "none", *SAVINGS)
    code, text = run_replay(*flags, "--json", out, "--report", page)
    assert (code, passes) == (0, ["counting, batches of 1024"])
    (record,) = json.loads(out.read_text())
    assert (record["policy"], record["batch_size"], record["rows_fetched"]) == ("none", 1024, None)
    assert record["thresholds"][0]["total"]["rows"] == record["rows_first_touch"]
    assert "cache.rows at least" not in text
    assert 'id="limits"' in page.read_text(encoding="utf-8")


def test_limits_in_days_need_a_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data.path", write_log(tmp_path), "--data.format", "parquet", "--limits", "2")
    assert run_replay(*flags, "--data.expire_unit", "days", "--policy", "none")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: data.expire_unit days needs a clock: ")


def test_csv_and_times_of_the_readers_link(tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "out.csv"
    flags = ("--data.path", write_log(tmp_path), *FLAGS, "--cache_rows", "400", "--json", out, "--csv", table)
    code, text = run_replay(*flags, "--bandwidth", "125MB", "--row_bytes", "1kB")
    assert code == 0
    records = json.loads(out.read_text())
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(record) for record in records]
    for row, record in zip(rows, records, strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in record.items()}
        assert record["link_s"] == (record["rows_fetched"] + record["rows_written"]) * 1000 / 125e6
    assert "at 0.125 GB/s (--bandwidth)" in text
