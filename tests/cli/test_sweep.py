from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.cli.main import main
from bagpipe.cluster.cluster_file import to_toml
from tests.cluster.clusters import cluster
from tests.forecast.jobs import replay
from tests.partition.graphs import towers


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "replay.json").write_text(replay(), encoding="utf-8")
    (tmp_path / "dense.json").write_text(towers(1, 2).to_json(), encoding="utf-8")
    (tmp_path / "cluster.toml").write_text(to_toml(cluster()), encoding="utf-8")
    named = {"--replay": "replay.json", "--model": "dense.json", "--cluster": "cluster.toml"}
    return ["sweep", *(word for flag, name in named.items() for word in (flag, str(tmp_path / name)))]


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


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--ranks", "1,x"], "--ranks: expected numbers above 0 with commas between, got '1,x'"),
        (["--servers", "0"], "--servers: expected numbers above 0 with commas between, got '0'"),
        (["--ranks", "9"], "no job of the grid can run: expected a cluster with 9 devices, got 4 of 'small'"),
        (["--dim", "0"], "--dim: expected at least 1, got 0"),
        (["--top", "0"], "--top: expected at least 1, got 0"),
        (["--rows", "-5"], "--rows: expected at least 0, got -5"),
        (["--weight-copies", "nan"], "--weight-copies: expected at least 0, got nan"),
        (["--replay", "/no/such"], "--replay: cannot read /no/such: "),
        (["--json", "/no/such/file"], "--json: cannot write /no/such/file: "),
    ],
)
def test_bad_flags(flags: list[str], more: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert main([*flags, *more]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_presets_are_swept(flags: list[str], capsys: pytest.CaptureFixture[str]):
    for name in ("h200-hosts", "v100-paper", "commodity"):
        assert main([*flags[:-1], name, "--ranks", "1,2"]) == 0
        assert "limit" in capsys.readouterr().out
