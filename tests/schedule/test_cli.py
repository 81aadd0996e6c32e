"""The command line, and the golden tables it prints. Regenerate with ``BAGPIPE_REGENERATE=1 pytest tests/schedule``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.cli import main

GOLDEN = sorted((Path(__file__).parent.parent / "golden" / "schedules").glob("*.txt"))
PROMPT = "$ python -m bagpipe "


def transcript(commands: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    blocks = []
    for command in commands:
        assert main(shlex.split(command)) == 0
        blocks.append(f"{PROMPT}{command}\n{capsys.readouterr().out}")
    return "\n".join(blocks)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = path.read_text(encoding="utf-8")
    commands = [line.removeprefix(PROMPT) for line in expected.splitlines() if line.startswith(PROMPT)]
    actual = transcript(commands, capsys)
    if os.environ.get("BAGPIPE_REGENERATE"):
        path.write_text(actual, encoding="utf-8")
    assert actual == expected


def test_there_are_golden_tables() -> None:
    assert GOLDEN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("schedule no-such", "invalid choice: 'no-such'"),
        ("no-such", "invalid choice: 'no-such'"),
        ("", "required: COMMAND"),
        ("schedule", "required: NAME"),
        ("schedule prefetch --batches many", "invalid int value: 'many'"),
        ("schedule prefetch --batches -1", "at least 0, got -1"),
        ("schedule prefetch --prefetch-depth 0", "prefetch_depth must be at least 1, got 0"),
        ("schedule prefetch --format pdf", "invalid choice: 'pdf'"),
        ("schedule prefetch --depth 3", "unrecognized arguments: --depth 3"),
        ("schedule prefetch --cost X_FETCH=1", "unknown op 'X_FETCH'"),
        ("schedule prefetch --cost F", "expected F=NUMBER"),
        ("schedule prefetch --cost F=-1", "at least 0"),
        ("schedule prefetch --cost F=nan", "at least 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(shlex.split(arguments))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "prefetch", "--format", "json", "--cost", "X_GET=2.5,0F=3"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"makespan", "bubble", "peak_in_flight"} < set(values)


def test_a_subprocess_prints_a_schedule_without_torch_or_numpy() -> None:
    probe = (
        "import sys, bagpipe.cli as cli\n"
        "code = cli.main(['schedule', 'prefetch', '--format', 'csv'])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'redis')))"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("#resource=data,")


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "bagpipe", "schedule", "prefetch", "--batches", "3000", "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
