"""A few chaos runs on the real programs; `make chaos` does hundreds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.harness.chaos import cli as chaos_cli
from tests.harness.chaos.cli import run_many
from tests.harness.chaos.run import PRELOADED
from tests.harness.faults import KINDS
from tests.harness.soak import cli as soak_cli
from tests.harness.zygote import Zygote

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.multiproc]

ROOT = Path(__file__).parents[2]
#: A launcher takes ten seconds to start its ranks, so only `make chaos` uses this kind.
FAST = tuple(kind for kind in KINDS if kind.name != "kill-agent")


@pytest.fixture(scope="module")
def imported() -> Iterator[Zygote]:
    with Zygote(PRELOADED, ROOT) as zygote:
        yield zygote


@pytest.fixture
def zygote(imported: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands fork from one zygote; otherwise each would import torch and torchrec again."""
    for cli in (chaos_cli, soak_cli):
        monkeypatch.setattr(cli, "Zygote", lambda *_: nullcontext(imported))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [range(202, 204), pytest.param(range(204, 206), marks=pytest.mark.slow)], ids=str)
def test_chaos_runs_are_exact(seeds: range) -> None:
    verdicts = list(run_many(seeds, kinds=FAST, jobs={"adagrad", "adam-2"}, programs=ROOT))
    assert not [verdict for verdict in verdicts if verdict.problem]
    assert {verdict.job for verdict in verdicts} == {"adagrad", "adam-2"}
    assert any(verdict.num_fired for verdict in verdicts)


@pytest.mark.usefixtures("zygote")
def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "verdicts.json"
    arguments = ["--runs", "1", "--seed", "5", "--kinds", "kill-trainer", "--jobs", "direct", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["chaos", *arguments])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        chaos_cli.main()
    assert ended.value.code == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 5      direct ")
    assert first.endswith(": equal")
    assert "1 equal, 0 wrong" in last
    (verdict,) = json.loads(path.read_text())
    assert (verdict["seed"], verdict["problem"]) == (5, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kinds", "earthquake"], "expected kinds of fault among kill-trainer, "),
        (["--ranks", "7"], "no such job among adagrad, "),
        (["--runs", "0"], "--runs: expected at least 1, got 0"),
        (["--ranks", "many"], "invalid literal"),
    ],
)
def test_bad_flags(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", *arguments])
    with pytest.raises(SystemExit) as ended:
        chaos_cli.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("zygote")
def test_a_short_soak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A short soak samples, stops the job and reports. It is too short to detect growth."""
    path = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--seconds", "3", "--interval", "0.5", "--json", str(path)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        soak_cli.main()
    out = capsys.readouterr().out
    for words in (
        "trainer-0     rss_bytes",
        "daemon        fds",
        "store         used_bytes",
        "checkpoints   used_bytes",
    ):
        assert words in out
    found = json.loads(path.read_text())
    assert found["steps"] > 0
    assert {trend["owner"] for trend in found["trends"]} == {"trainer-0", "daemon", "store", "checkpoints"}


def test_a_soak_has_a_minimum_duration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--seconds", "5"])
    with pytest.raises(SystemExit) as ended:
        soak_cli.main()
    assert ended.value.code == 2
    assert "expected at least one rank and a few intervals of 10 s" in capsys.readouterr().err
