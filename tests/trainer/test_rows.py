"""Flags of `python -m trainer rows`; tests/system/test_rows.py runs it on jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from trainer.rows import rows


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "rows: expected report or compact, got 'nothing'"),
        ("drop", "rows: expected report or compact, got 'drop'"),
        ("report", "rows report needs store.url, checkpoint.dir or both, got none"),
        ("report --ages 1,x --store.url memory://", "--ages must have numbers of at least 0, got 'x'"),
        ("report --ages 0 --store.url memory://", "--ages must be numbers above 0, separated by commas, got '0'"),
        ("report --ages 5 --store.url memory://", "--ages needs checkpoint.dir"),
        ("report --ages 5 --unit weeks", "--unit must be one of examples, steps, days, got 'weeks'"),
        ("report --unit steps", "--unit is that of --ages, which is not given"),
        ("report --store.url memory://", "store.url memory:// is private to one process"),
        ("report --checkpoint.dir none-there", "checkpoint.dir none-there has no checkpoint"),
        ("report --checkpoint.dir none-there --checkpoint.resume 9", "none-there has no whole checkpoint of step 9"),
        ("report --checkpoint.dir a --checkpoint.resume best", "a has no whole checkpoint of a best evaluation"),
        ("report --checkpoint.dir a --checkpoint.resume never", "must be auto, best or a step number, got never"),
        ("report --dry-run", "unknown option --dry-run"),
        ("compact", "rows compact needs checkpoint.dir"),
        ("compact --checkpoint.dir a", "rows compact needs --expire-after above 0, for all tables or with --table"),
        ("compact --checkpoint.dir a --expire-after -1", "--expire-after must have numbers of at least 0, got '-1'"),
        ("compact --checkpoint.dir a --expire-after nan", "--expire-after must have numbers of at least 0, got 'nan'"),
        ("compact --checkpoint.dir a --table C1=4,C1=5", "--table must be TABLE=NUMBER, each table once"),
        (
            "compact --checkpoint.dir a --table C1",
            "--table must be TABLE=NUMBER, each table once, separated by commas, got 'C1'",
        ),
        ("compact --checkpoint.dir none-there --table C1=4", "none-there has no checkpoint of trained rows"),
    ],
)
def test_a_wrong_command_is_one_line(words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        rows(words.split())
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--help", "report --help", "compact --help"])
def test_help_names_the_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        rows(words.split())
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert ("--ages" in out, "--expire-after" in out) == ("compact" not in words, "report" not in words)
