"""Draws of some kinds on the real programs, and the command; `make fuzz` does hundreds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from tests.harness.fuzz import cli
from tests.harness.fuzz.draw import Draw
from tests.harness.fuzz.drawing import draw
from tests.harness.fuzz.log_files import write_log
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.trial import PLAIN_KEYS, Verdict, difference_from_plain_loop, has_plain_loop, run_trial

pytestmark = [pytest.mark.redis, pytest.mark.multiproc, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SEED = 11
#: Others than those in the suite.
MORE: dict[str, Callable[[Draw], bool]] = {
    "stages": lambda item: item.world_size == 1 and int(dict(item.job)["pipeline.stages"]) > 1,
    "ranks": lambda item: item.world_size == 2,
    "half rows": lambda item: dict(item.job)["cache.dtype"] in ("float16", "bfloat16"),
    "own model": lambda item: "model.factory" in dict(item.job),
    "float64": lambda item: dict(item.job)["run.dtype"] == "float64",
    "ranks of stages": lambda item: item.world_size > 1 and int(dict(item.job)["pipeline.stages"]) > 1,
    "four ranks": lambda item: item.world_size == 4,
    "three kills": lambda item: any(len(twin.kills) == 3 for twin in item.twins),
}


def _of_all(*kinds: str) -> Callable[[Draw], bool]:
    return lambda item: all(MORE[kind](item) for kind in kinds)


#: Kinds of draws in the suite. Of each, the first small one that is not refused is tried.
KINDS = {"ranks of an own model in float64": _of_all("ranks", "own model", "float64")}
MORE["stages with half rows"] = _of_all("stages", "half rows")
COMMAND = 202


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), ROOT) as site:
        yield site


@cache
def _draw(number: int) -> Draw:
    return draw(SEED, number)


def _first_trained(
    is_wanted: Callable[[Draw], bool], site: Site, change: Callable[[Draw], Draw] = lambda item: item
) -> tuple[Draw, Verdict]:
    """The first small draw of a kind whose job is not refused, and its trial. The caller removes the folder."""
    items = (change(_draw(number)) for number in range(1000))
    for item in itertools.islice((d for d in items if 20 <= d.log.num_examples <= 120 and is_wanted(d)), 5):
        verdict = run_trial(item, site)
        assert verdict.problem == "", "\n".join(verdict.commands)
        if verdict.end.endswith(" steps"):
            return item, verdict
        shutil.rmtree(verdict.folder)
    raise AssertionError("five draws of the kind were refused")


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_the_twins_of_a_draw_agree(kind: str, site: Site) -> None:
    _, verdict = _first_trained({**KINDS, **MORE}[kind], site)
    shutil.rmtree(verdict.folder)
    assert verdict.num_comparisons >= 2


def _with_plain_keys(item: Draw) -> Draw:
    """The draw in float64, without settings that the plain loop does not know. Few draws have none of them."""
    job = {key: PLAIN_KEYS.get(key, value) for key, value in item.job if key != "optim.rows_by_table"}
    job |= {"run.dtype": "float64", "run.autocast": "off", "cache.dtype": "run"}
    return dataclasses.replace(item, job=tuple(sorted(job.items())))


def test_the_plain_loop_agrees_and_notices_another_rate(site: Site, tmp_path: Path) -> None:
    def is_compared(item: Draw) -> bool:
        job = dict(item.job)
        warms_up = {job.get(key, "0") for key in ("optim.warmup_steps", "optim.rows_warmup_steps")} != {"0"}
        is_killed = any(twin.has_checkpoints and twin.kills for twin in item.twins)
        return item.world_size == 1 and has_plain_loop(item) and is_killed and not warms_up

    item, verdict = _first_trained(is_compared, site, _with_plain_keys)
    assert verdict.num_comparisons == 3
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


def test_the_pairwise_array_is_listed_and_always_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--pairs", "--list", "--first", "4", "--runs", "3"])
    printed = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["4", "5", "6", "refused:"]
    summary = re.fullmatch(r"(\d+) jobs of seed 1: (\d+) of (\d+) pairs, (\d+) refused", lines[-1])
    assert summary is not None
    jobs, found, pairs, refused = map(int, summary.groups())
    assert 60 <= jobs <= 120
    assert (found + refused, refused) == (pairs, len(lines) - 4)


def test_a_job_of_the_array_that_is_refused_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {"num_starts": 3, "num_kills": 1, "num_comparisons": 0}
    tried = []

    def refused(item: Draw, site: Site) -> Verdict:
        tried.append(item)
        folder = tmp_path / str(len(tried))
        folder.mkdir()
        return Verdict(
            seed=1, number=2, draw=str(item), end="code 2: error: no", seconds=1.0, folder=str(folder), **numbers
        )

    monkeypatch.setattr(cli, "Site", lambda *_: nullcontext(None))
    monkeypatch.setattr(cli, "run_trial", refused)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--pairs", "--first", "2", "--runs", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "code 2: error: no: WRONG: all of its draws are refused" in out
    assert "again: python -m tests.harness.fuzz --runs 1 --seed 1 --pairs --first 2" in out
    assert len(set(map(str, tried))) == len(tried) > 1
    assert len(list(tmp_path.iterdir())) == 1  # the last draw's folder is kept


@pytest.mark.parametrize(
    "arguments", [["--runs", "0"], ["--jobs", "0"], ["--first", "-1"], ["--first", "999", "--pairs"]]
)
def test_bad_flags(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert re.search(f"error: {arguments[0]}: expected (at least|less than) ", capsys.readouterr().err)
