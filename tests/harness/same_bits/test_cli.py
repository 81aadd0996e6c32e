"""The command on toy checkouts, each kind of difference, and one real job."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.fuzz.site import Site
from tests.harness.same_bits import cli
from tests.harness.same_bits.plan import JOBS
from tests.harness.same_bits.runs import Known, write_data

pytestmark = [pytest.mark.redis, pytest.mark.multiproc, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]

#: A job of twelve steps, which continues the state in its checkpoint folder or in that of another job.
TRAINER = """
import hashlib, json, sys
from pathlib import Path

def main():
    flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    read = lambda folder: json.loads((Path(folder) / "state-1").read_text())
    own, source = Path(flags["checkpoint.dir"]), flags.get("checkpoint.start_from")
    has_own = (own / "state-1").exists()
    first, state = read(own) if has_own else (0, read(source)[1] if source else "")
    last = int(flags.get("run.steps", 12))
    for step in range(first, last):
        state = hashlib.sha256(f"{step} {state}".encode()).hexdigest()
    own.mkdir(exist_ok=True)
    (own / "state-1").write_text(json.dumps((last, state)))
    result = dict(steps=last, dense_digest=state, seconds=0, started_from=source)
    result["resumed_from"] = first if has_own else None
    Path(sys.argv[-1]).write_text(json.dumps(result))
"""

#: Edits of the toy, and what the command says of them.
EDITS = {
    "none": ("", "", ""),
    "bits": ("{step} {state}", "{step}  {state}", "WRONG: dense_digest "),
    "format": ("state-1", "state-2", "WRONG: from BASE's files: they were not used"),
    "resume": ("read(own) if has_own", "(9, '') if has_own", "WRONG: from BASE's files: dense_digest "),
}


def _git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command in a repository with the toy, as a function of its edit and of flags."""
    repository = tmp_path / "repository"
    (repository / "trainer").mkdir(parents=True)
    (repository / "trainer" / "__init__.py").touch()
    program = repository / "trainer" / "cli.py"
    program.write_text(TRAINER)
    _git(repository, "init", "--quiet")
    _git(repository, "add", "trainer")
    _git(repository, "commit", "--quiet", "--message", "toy")
    monkeypatch.chdir(repository)
    monkeypatch.setattr(cli, "Site", functools.partial(Site, modules=("trainer.cli",)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(old: str, new: str, *flags: str) -> int:
        program.write_text(TRAINER.replace(old, new))
        known = ["--known", str(tmp_path / "known")]
        monkeypatch.setattr(sys, "argv", ["same_bits", "--base", "HEAD", *known, *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert _git(repository, "worktree", "list").count("\n") == 1
        return int(str(ended.value.code))

    return run


@pytest.mark.parametrize("edit", EDITS)
def test_checkouts_of_a_toy(
    edit: str, same_bits: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, new, words = EDITS[edit]
    assert same_bits(old, new, "--only", "dlrm", "start-from") == (1 if words else 0)
    *lines, last = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")]
    assert sorted(line.split()[0] for line in lines) == ["dlrm", "start-from"]
    dlrm = next(line for line in lines if line.startswith("dlrm"))
    assert (words or "BASE run, HEAD run, HEAD from BASE's files: equal") in dlrm
    assert (" 0 differ" in last) == (not words)
    assert bool([*tmp_path.glob("same-bits-*")]) == bool(words)


def test_ends_at_the_commit_are_run_once(
    same_bits: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--only", "pipeoptim", "--json", str(tmp_path / "verdicts.json")]
    assert [same_bits("", "", *flags), same_bits("", "", *flags), same_bits("", "", *flags, "--anew")] == [0, 0, 0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pipeoptim")]
    assert ["BASE known" in line for line in lines] == [False, True, False]
    (verdict,) = json.loads((tmp_path / "verdicts.json").read_text())
    assert (verdict["job"], verdict["problem"], verdict["commands"]) == ("pipeoptim", "", [])


def test_what_the_commit_refuses_is_new(same_bits: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """A toy that ends with code 2 at the commit, and not here."""
    own = Path("trainer/cli.py")
    own.write_text(TRAINER.replace("    last =", "    sys.exit(2)\n    last ="))
    _git(Path.cwd(), "commit", "--quiet", "--all", "--message", "refuse")
    assert same_bits("", "", "--only", "dlrm") == 0
    assert "refused at BASE, HEAD run: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_job(tmp_path: Path) -> None:
    job = next(job for job in JOBS if job.name == "start-from")
    known = Known(tmp_path / "known")
    data = write_data([job.data], tmp_path)[job.data]
    with Site(tmp_path / "site", ROOT) as site:
        verdict = cli.compare_job(job, site, site, known, data, tmp_path)
    assert (verdict.problem, verdict.end) == ("", "BASE run, HEAD run, HEAD from BASE's files")
    ended = known.get(known.place(job, data))
    assert ended is not None
    assert ended.result is not None
    assert len(ended.result["embedding_digest"]) == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--base", "HEAD", "--jobs", "0"], "--jobs: expected at least 1, got 0"),
        (["--base", ""], "--base: expected a commit, as in make same-bits BASE=main, got nothing"),
        (["--base", "no-such-name"], "--base: expected a commit of this repository, got 'no-such-name'"),
        (["--base", "HEAD", "--only", "dlrm", "pipedram"], "--only: expected one of pipedream, "),
    ],
)
def test_bad_flags(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["same_bits", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"error: {words}" in capsys.readouterr().err
