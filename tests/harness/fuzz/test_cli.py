"""Seven draws on the real programs, and the command; `make fuzz` does hundreds."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.harness.fuzz import cli
from tests.harness.fuzz.draw import Draw
from tests.harness.fuzz.drawing import draw
from tests.harness.fuzz.log_files import write_log
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.trial import Verdict, difference_from_plain_loop, run_trial

pytestmark = [pytest.mark.redis, pytest.mark.multiproc, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SEED = 11
#: Small jobs that differ in format, model, optimizers, number types, stages, stores, and ends; with those below, seven.
NUMBERS = (2, 309, 60, 167, 200)
#: Others, of the full suite.
MORE = (7, 157, 216)
COMMAND = 202
#: A draw that is compared with the plain loop.
PLAIN = 76


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), ROOT) as site:
        yield site


@pytest.mark.parametrize("number", [*NUMBERS, *(pytest.param(number, marks=pytest.mark.slow) for number in MORE)])
def test_the_twins_of_a_draw_agree(number: int, site: Site) -> None:
    verdict = run_trial(draw(SEED, number), site)
    shutil.rmtree(verdict.folder)
    assert verdict.problem == "", "\n".join(verdict.commands)
    assert verdict.end.endswith(" steps")
    assert verdict.num_comparisons >= 2


def test_the_plain_loop_agrees_and_notices_another_rate(site: Site, tmp_path: Path) -> None:
    item = draw(SEED, PLAIN)
    verdict = run_trial(item, site)
    assert (verdict.problem, verdict.num_comparisons) == ("", 3)
    other = dataclasses.replace(item, job=tuple(sorted({**dict(item.job), "optim.rows_lr": "0.0200001"}.items())))
    shutil.rmtree(Path(verdict.folder) / "resumed" / "export")
    problem = difference_from_plain_loop(other, site, write_log(item.log, tmp_path), Path(verdict.folder) / "resumed")
    shutil.rmtree(verdict.folder)
    assert "from a plain loop" in problem


def test_the_command(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "verdicts.json"
    monkeypatch.setattr(cli, "Site", lambda *_: nullcontext(site))
    monkeypatch.setattr(
        sys, "argv", ["fuzz", "--runs", "1", "--seed", str(SEED), "--first", str(COMMAND), "--json", str(path)]
    )
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f" {COMMAND} ")
    assert first.endswith(": equal")
    assert last.startswith("1 runs of seed 11, ")
    assert last.endswith(": 0 wrong")
    (verdict,) = json.loads(path.read_text())
    assert (verdict["number"], verdict["problem"]) == (COMMAND, "")


def test_a_wrong_draw_is_reported_with_its_commands_and_a_simpler_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(item: Draw, site: Site) -> Verdict:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        is_wrong = dict(item.job)["optim.rows"] == dict(draw(SEED, COMMAND).job)["optim.rows"]
        numbers = {"num_starts": 3, "num_kills": 1, "num_comparisons": 0}
        return Verdict(
            seed=item.seed,
            number=item.number,
            draw=str(item),
            end="5 steps",
            seconds=1.0,
            problem="cached: loss 1 for 2" if is_wrong else "",
            commands=("python -m trainer",),
            folder=str(folder),
            **numbers,
        )

    monkeypatch.setattr(cli, "Site", lambda *_: nullcontext(None))
    monkeypatch.setattr(cli, "run_trial", wrong)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--runs", "1", "--seed", str(SEED), "--first", str(COMMAND)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "WRONG: cached: loss 1 for 2" in out
    assert f"again: python -m tests.harness.fuzz --runs 1 --seed {SEED} --first {COMMAND}" in out
    assert re.search(r"simpler, also wrong: dlrm on \d+ ", out), out
    assert out.splitlines()[-1].endswith(f"1 wrong, numbers [{COMMAND}]")
    # The wrong draw's folder and that of the simplest one are kept.
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--jobs", "0"], ["--first", "-1"]])
def test_bad_flags(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"error: {arguments[0]}: expected at least" in capsys.readouterr().err
