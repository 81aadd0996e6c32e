"""`tools/compare_speed.py`: numbers in JSON of different shapes, and the ratio of two checkouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.compare_speed import CASES, Case, figures, main

PROGRAM = """
import json, sys
from pathlib import Path
SHAPE
Path(sys.argv[1], "any.json").write_text(json.dumps(content))
"""
OLD = 'content = {"results": [{"policy": "paper", "plan_ms": 2.0}, {"policy": "x", "plan_ms": 4.0}]}'
NEW = (
    'content = {"parts": {"plans": {"run": {"settings": {"policy": 3}}, "found": '
    '[{"policy": "drop-unused", "plan_ms": 3.0}, {"policy": "y", "plan_ms": 1.0}]}}}'
)


def checkout(folder: Path, module: str, shape: str) -> Path:
    folder.mkdir()
    (folder / f"{module}.py").write_text(PROGRAM.replace("SHAPE", shape))
    return folder


def test_two_layouts_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = checkout(tmp_path / "old", "before", OLD), checkout(tmp_path / "new", "after", NEW)
    flags = ["--old", "before {out}", "--new", "after {out}", "--values", "plan_ms", "--labels", "policy"]
    out = tmp_path / "rounds.json"
    assert main([str(old), str(new), *flags, "--rounds", "3", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2:] == ["| command | drop-unused: plan_ms | 2 | 3 | 1.500 | 1.500 to 1.500 |"]
    sides = [line.rpartition(" ")[2] for line in printed.err.splitlines()]
    assert sides == ["old", "new", "new", "old", "old", "new"]
    assert json.loads(out.read_text())["command"]["new"]["y: plan_ms"] == [1.0, 1.0, 1.0]


def test_a_command_that_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = checkout(tmp_path / "old", "before", "raise SystemExit('no server')")
    assert main([str(old), str(old), "--old", "before {out}", "--values", "plan_ms"]) == 1
    assert "no server" in capsys.readouterr().err


def test_nothing_in_common(tmp_path: Path) -> None:
    old, new = checkout(tmp_path / "old", "m", OLD), checkout(tmp_path / "new", "m", NEW)
    flags = ["--old", "m {out}", "--values", "sort_ms", "--rounds", "1"]
    assert main([str(old), str(new), *flags]) == 2


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"a": {"s": 1.0}, "b": [{"s": [1.0, 2.0, 9.0]}]}, {"a: s": 1.0, "b: s": 2.0}),
        ({"write": {"s": {"ours": 2, "replay": 1}}}, {"write: s ours": 2.0, "write: s replay": 1.0}),
        ([{"n": 1, "s": 5}, {"n": 1, "s": 7}, {"n": 2, "s": None}], {"1: s": 6.0}),
    ],
)
def test_figures_are_found_anywhere(content: object, found: dict[str, float]) -> None:
    assert figures(content, Case(commands=(), values=("s",), labels=("n",))) == found


@pytest.mark.parametrize("name", CASES)
def test_every_case_finds_figures_in_the_published_results(name: str) -> None:
    root = Path(__file__).parents[2]
    assert CASES[name].command(root).words.split()[0] == f"benchmarks.{name}.main"
    found = figures(json.loads((root / "benchmarks" / name / "results.json").read_text()), CASES[name])
    assert len(found) >= 8
