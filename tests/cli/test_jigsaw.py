from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.cli.main import main

ROOT = Path(__file__).parents[2]
TWO = ["jigsaw", str(ROOT / "examples" / "jigsaw" / "two_jobs.toml"), "--ranks", "2"]


def test_all_policies_with_whole_and_partial_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TWO) == 0
    runs, jobs = capsys.readouterr().out.split("\n\n")
    assert [line.split()[:4] for line in runs.splitlines()[1:]] == [
        ["fifo", "full", "32", "75.0%"],
        ["fifo", "partial", "32", "62.5%"],
        ["fair", "full", "32", "75.0%"],
        ["fair", "partial", "32", "62.5%"],
        ["edf", "full", "32", "75.0%"],
        ["edf", "partial", "32", "62.5%"],
        ["jigsaw", "full", "25", "96.0%"],
        ["jigsaw", "partial", "21", "95.2%"],
    ]
    assert len(jobs.splitlines()) == 1 + 2 * 8


def test_one_policy_with_its_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--policy", "jigsaw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["jigsaw", "partial", "21"]
    assert "rank 1      AaBbAaaBbbAaBbAaaBbb." in lines


def test_whole_backwards_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--full", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2
    assert [(run["policy"], run["backward"]) for run in found["runs"]] == [
        *(("fifo", "full"), ("fair", "full"), ("edf", "full"), ("jigsaw", "full"))
    ]


@pytest.mark.parametrize(("name", "begins"), [("svg", "<svg "), ("perfetto", '{"displayTimeUnit"')])
def test_formats_of_one_policy(name: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--policy", "edf", "--format", name]) == 0
    assert capsys.readouterr().out.startswith(begins)
    assert main([*TWO, "--format", name]) == 2
    line = f"--format {name}: expected --policy fifo or fair or edf or jigsaw, got all\n"
    assert capsys.readouterr().err.endswith(line)


def test_a_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "jobs.html"
    assert main([*TWO, "--report", str(out)]) == 0
    assert "<title>Jobs of two_jobs.toml</title>" in out.read_text(encoding="utf-8")


def test_late_jobs_and_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.toml"
    job = "[[jobs]]\nname = 'a'\niterations = 1\nworkers = 5\nforward_s = 1\nbackward_s = 2\ndeadline_s = 2\n"
    path.write_text(f"version = 1\n{job}", encoding="utf-8")
    assert main(["jigsaw", str(path), "--ranks", "6", "--policy", "fifo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("0.0% to 100.0%")
    assert "2 late" in lines[4]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["/no/such.toml", "--ranks", "2"], "jobs: cannot read /no/such.toml: "),
        ([TWO[1], "--ranks", "0"], "ranks: expected at least 1, got 0"),
        ([TWO[1], "--ranks", "1"], "job 'first': workers: expected at most the 1 ranks, got 2"),
        ([TWO[1], "--ranks", "2", "--report", "/no/such/file"], "--report: folder /no/such does not exist"),
        (
            [TWO[1], "--ranks", "2", "--report", "/dev/null"],
            "--report: expected a file, /dev/null is not a regular file",
        ),
    ],
)
def test_bad_flags(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jigsaw", *flags]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
