from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.cli.main import main
from bagpipe.forecast.axes import AXES
from tests.cli.sweep_files import sweep_flags


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return sweep_flags(tmp_path)


def test_a_table_and_all_points(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "points.json"
    assert main([*flags, "--ranks", "1,2,8", "--servers", "1,2", "--direct", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["step", "ms"]
    assert lines[-1].startswith("12 points, 4 cannot run, ")
    points = json.loads(out.read_text(encoding="utf-8"))
    assert len(points) == 12
    assert sum(point["error"] is not None for point in points) == 4
    best = min(point["step_s"] for point in points if point["step_s"] is not None)
    assert float(lines[1].split()[0]) == pytest.approx(best * 1e3, rel=1e-3)


def test_a_point_has_the_keys_of_the_axes(flags: list[str], tmp_path: Path):
    out = tmp_path / "points.json"
    assert main([*flags, "--json", str(out)]) == 0
    [point] = json.loads(out.read_text(encoding="utf-8"))
    assert list(point) == [
        *(axis.name for axis in AXES),
        *("error", "step_s", "examples_per_s", "usd_per_million_examples", "device_bytes", "limit"),
        *("op_s", "shares", "busy"),
    ]


def test_columns_with_the_usual_value_are_left_out(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(flags) == 0
    assert "ports" not in capsys.readouterr().out.splitlines()[0]
    assert main([*flags, "--bandwidths", "0.5"]) == 0
    head, line = capsys.readouterr().out.splitlines()[:2]
    assert "ports" in head
    assert "x 0.5" in line


def test_more_ranks_than_examples_are_points_with_an_error(flags: list[str], tmp_path: Path):
    out = tmp_path / "points.json"
    assert main([*flags, "--ranks", "1,2048", "--json", str(out)]) == 0
    errors = [point["error"] for point in json.loads(out.read_text(encoding="utf-8"))]
    assert errors == [None, "ranks: expected at most the 1024 examples of a batch, got 2048"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--ranks", "1,x"], "--ranks: expected numbers above 0 with commas between, got '1,x'"),
        (["--ranks", "1.5"], "--ranks: expected numbers above 0 with commas between, got '1.5'"),
        (["--ranks", ""], "--ranks: expected numbers above 0 with commas between, got ''"),
        (["--servers", "0"], "--servers: expected numbers above 0 with commas between, got '0'"),
        (["--cachers", "-1"], "--cachers: expected numbers above 0 with commas between, got '-1'"),
        (["--bandwidths", "1,0"], "--bandwidths: expected numbers above 0 with commas between, got '1,0'"),
        (["--bandwidths", "inf"], "--bandwidths: expected numbers above 0 with commas between, got 'inf'"),
        (["--bandwidths", "nan"], "--bandwidths: expected numbers above 0 with commas between, got 'nan'"),
        (["--ranks", "9"], "no job of the grid can run: expected a cluster with 9 devices, got 4 of 'small'"),
        (["--stages", "0"], "--stages: expected numbers above 0 with commas between, got '0'"),
        (["--microbatches", "4"], "--microbatches: expected --stages, too"),
        (["--schedules", "gpipe"], "--schedules: expected --stages, too"),
        (
            ["--stages", "2", "--schedules", "gpipe,x"],
            "--schedules: expected gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2 with commas between, got 'x'",
        ),
        (["--shards", ""], "--shards: expected none, optimizer, gradients, parameters with commas between, got ''"),
        (["--resident"], "--resident: expected --rows, which the caches hold, got none"),
        (["--dim", "0"], "--dim: expected at least 1, got 0"),
        (["--top", "0"], "--top: expected at least 1, got 0"),
        (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
        (["--rows", "-5"], "--rows: expected at least 0, got -5"),
        (["--weight-copies", "nan"], "--weight-copies: expected at least 0, got nan"),
        (["--replay", "/no/such"], "--replay: cannot read /no/such: "),
        (["--json", "/no/such/file"], "--json: folder /no/such does not exist"),
        (["--report", "/no/such/file"], "--report: folder /no/such does not exist"),
        (["--report", "/dev/null"], "--report: expected a file, /dev/null is not a regular file"),
        (["--resume", "/no/such/file"], "--resume: cannot write /no/such/file: No such file or directory"),
        (["--resume", "/dev/null"], "--resume: expected a file, /dev/null is not a regular file"),
    ],
)
def test_bad_flags(flags: list[str], more: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert main([*flags, *more]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_bandwidth_that_makes_times_infinite(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*flags, "--bandwidths", "1e-320"]) == 2
    error = capsys.readouterr().err
    assert "expected numbers of at least 0, got inf" in error
    assert error.count("\n") == 1


def test_points_can_be_piped(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*flags, "--json", "/dev/stdout"]) == 0


def test_presets_are_swept(flags: list[str], capsys: pytest.CaptureFixture[str]):
    for name in ("h200-hosts", "v100-paper", "commodity"):
        assert main([*flags[:-1], name, "--ranks", "1,2"]) == 0
        assert "limit" in capsys.readouterr().out


def test_a_report_is_written(flags: list[str], tmp_path: Path):
    out = tmp_path / "sweep.html"
    assert main([*flags, "--ranks", "1,2,8", "--report", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "<title>Sweep on small</title>" in text
    assert "Rows of <code>replay.json</code>, dense part of <code>dense.json</code>; 3 points, 2 can run" in text


def test_a_second_call_takes_the_points_of_the_first(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kept, plain = tmp_path / "points.jsonl", tmp_path / "plain.json"
    varied = ["--ranks", "1,2,8", "--servers", "1,2"]
    assert main([*flags, *varied, "--json", str(plain)]) == 0
    for _ in range(2):
        out = tmp_path / "points.json"
        assert main([*flags, *varied, "--resume", str(kept), "--json", str(out)]) == 0
        assert out.read_bytes() == plain.read_bytes()
        assert len(kept.read_text(encoding="utf-8").splitlines()) == 1 + 6
    capsys.readouterr()
    assert main([*flags, "--ranks", "1,2", "--servers", "1,2", "--resume", str(kept)]) == 2
    error = capsys.readouterr().err
    assert "is of another grid: --ranks is 1,2,8 there and 1,2 here; name another file" in error
    assert error.count("\n") == 1


def test_rows_that_stay_in_the_caches(flags: list[str], tmp_path: Path):
    """They take memory of every rank, and no time of the store."""
    out = tmp_path / "points.json"
    assert main([*flags, "--ranks", "1,2", "--resident", "--rows", "1e6", "--json", str(out)]) == 0
    points = {(point["policy"], point["ranks"]): point for point in json.loads(out.read_text(encoding="utf-8"))}
    one, two = points["resident", 1], points["resident", 2]
    assert (one["cache_rows"], two["cache_rows"]) == (1_000_000, 500_000)
    cached = points["belady-window", 1]
    assert one["op_s"]["X_WRITEBACK"] < cached["op_s"]["X_WRITEBACK"]
    assert one["device_bytes"]["cache"] > cached["device_bytes"]["cache"]


def test_rows_of_a_later_epoch_are_read(flags: list[str], tmp_path: Path):
    seconds = []
    for more in ([], ["--stored-rows"]):
        out = tmp_path / "points.json"
        assert main([*flags, *more, "--json", str(out)]) == 0
        [point] = json.loads(out.read_text(encoding="utf-8"))
        seconds.append(point["op_s"]["X_FETCH"])
    assert seconds[0] < seconds[1]
