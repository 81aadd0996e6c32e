"""A program and its standard streams, in processes of their own: what is closed, gone, full or of few characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagpipe.util.output_streams import lasting_output

ROOT = Path(__file__).parents[2]

#: Prints lines, more than a pipe holds, and leaves a file.
PROGRAM = """
import os, sys
from bagpipe.util.output_streams import lasting_output
from bagpipe.util.printing import print_error, print_text

with lasting_output():
    with open(sys.argv[1], "w") as file:
        for number in range(int(sys.argv[2])):
            print_text(f"{number} … µ caf\\udce9")
            sys.stdout.flush()
        print_error("note: … done")
        file.write("done")
    sys.exit(int(sys.argv[3]))
"""


def run(*arguments: object, close: tuple[int, ...] = (), **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the program; `close` are descriptors that it does not have."""
    redirections = "".join(f" {number}>&-" for number in close)
    command = ["sh", "-c", f'exec "$@"{redirections}', "sh", sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.PIPE, timeout=120, **how)


@pytest.mark.parametrize("close", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_take_what_is_written(tmp_path: Path, close: tuple[int, ...]) -> None:
    done = run(tmp_path / "file", 3, 5, close=close, stdout=subprocess.PIPE)
    assert (done.returncode, (tmp_path / "file").read_text()) == (5, "done"), "no output is in the file"
    assert b"Traceback" not in done.stderr


def test_a_reader_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(tmp_path / "file", 20_000, 0, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr, (tmp_path / "file").read_text()) == (0, "note: … done\n".encode(), "done")


def test_a_child_has_the_streams_that_its_parent_opened() -> None:
    """Otherwise the first file that the child opens takes what it prints."""
    program = """
import os, subprocess, sys
from bagpipe.util.output_streams import lasting_output
with lasting_output():
    subprocess.run([sys.executable, "-c", "import os; os.fstat(1); os.fstat(0)"], check=True)
"""
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&-', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_pipe_that_does_not_wait_gets_everything(tmp_path: Path) -> None:
    """Other programs that share the pipe set it so; Python would lose what does not fit."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), "20000", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=write) as program:
        os.close(write)
        with os.fdopen(read, "rb") as reader:
            lines = reader.read().splitlines()
    assert (program.returncode, len(lines)) == (0, 20_000)


def test_other_errors_pass_and_the_streams_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), lasting_output():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (2, 2)])
def test_output_without_room_is_said_at_the_end(tmp_path: Path, code: int, expected: int) -> None:
    with open("/dev/full", "wb") as full:
        done = run(tmp_path / "file", 3, code, stdout=full)
    assert (done.returncode, (tmp_path / "file").read_text()) == (expected, "done")
    lines = done.stderr.decode().splitlines()
    said = "error: cannot write standard output: No space left on device; free space there, or choose another place"
    assert lines == ["note: … done", *([said] if code == 0 else [])]


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(tmp_path: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = run(tmp_path / "file", 1, 0, stdout=subprocess.PIPE, env=environment)
    line = "0 … µ caf\\udce9\n".encode(encoding, errors="backslashreplace")
    assert (done.returncode, done.stdout) == (0, line)


@pytest.mark.multiproc
@pytest.mark.parametrize("words", [["-m", "trainer"], ["-m", "cacher"], ["-m", "data"], ["-m", "bagpipe", "schedule"]])
def test_every_program_writes_to_such_streams(words: list[str]) -> None:
    """Its help has characters that latin-1 lacks, or is longer than what its reader takes."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, *words, "--help"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.read(5) == b"usage"
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 0
