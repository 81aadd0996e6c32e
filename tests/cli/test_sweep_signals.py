"""Sweeps that are killed and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.sweep_files import sweep_flags

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]

#: Runs the command, and sends itself a signal while the third chunk is written, whose line is torn.
DYING = """
import os, signal, sys
from bagpipe.cli import sweep_file
from bagpipe.cli.main import main

number, calls, append = int(sys.argv[1]), [], sweep_file.SweepFile._append

def torn(self, text):
    calls.append(text)
    if len(calls) < 4:  # the first call writes the header
        return append(self, text)
    append(self, text[: len(text) // 2])
    os.kill(os.getpid(), number)

sweep_file.SweepFile._append = torn
if __name__ == "__main__":
    raise SystemExit(main(sys.argv[2:]))
"""


def run(folder: Path, code: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    flags = [*sweep_flags(folder), "--ranks", "1,2,4,8", "--bandwidths", ",".join(str(1 + n / 999) for n in range(900))]
    return subprocess.run(
        [sys.executable, *code, *flags, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """All points of a sweep in one process without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "points.json"
    done = run(folder, ["-m", "bagpipe"], "--jobs", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


def test_more_processes_find_the_same(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "points.json"
    done = run(tmp_path, ["-m", "bagpipe"], "--jobs", "3", "--json", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("number", "jobs", "status", "said"),
    [
        pytest.param(signal.SIGKILL, "1", -signal.SIGKILL, "", marks=pytest.mark.slow),
        (signal.SIGKILL, "2", -signal.SIGKILL, None),  # Python's resource tracker may tell of semaphores
        pytest.param(signal.SIGINT, "1", 130, "interrupted\n", marks=pytest.mark.slow),
        (signal.SIGINT, "2", 130, "interrupted\n"),
    ],
)
def test_a_sweep_goes_on_after_a_signal(
    tmp_path: Path, whole: bytes, number: int, jobs: str, status: int, said: str | None
) -> None:
    kept, out, script = (tmp_path / name for name in ("kept.jsonl", "points.json", "dying.py"))
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{DYING}", encoding="utf-8")
    died = run(tmp_path, [str(script), str(int(number))], "--jobs", jobs, "--resume", str(kept))
    assert died.returncode == status
    assert said is None or died.stderr == said
    lines = kept.read_bytes().split(b"\n")
    assert lines[-1], "the last line is torn"
    known = len(lines) - 2
    assert 1000 <= known < 3600
    done = run(tmp_path, ["-m", "bagpipe"], "--jobs", "2", "--resume", str(kept), "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole
    points = [json.loads(line)["point"] for line in kept.read_bytes().splitlines()[1:]]
    assert sorted(points) == list(range(3600)), "each point was forecast once"
