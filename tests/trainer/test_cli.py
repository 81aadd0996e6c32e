"""The trainer's program: how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]

#: Fails or not; SIGTERM comes in the clean-up, which goes on or raises an error of its own.
_PROGRAM = """
import os, signal
from bagpipe.errors import JobError, PeerError
from trainer import cli, job

def clean_up():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        if {replaces}:
            raise JobError("rank 1 is gone")
        raise

def run_job(*_, **__):
    try:
        if {fails}:
            raise PeerError("rank 1 is gone")
    finally:
        clean_up()

job.run_job = run_job
cli.main(["--data.format", "synthetic", "--data.limit", "100"])
"""


@pytest.mark.parametrize(
    ("fails", "replaces", "code", "error"),
    [
        pytest.param(True, False, 1, "error: rank 1 is gone\n", marks=pytest.mark.slow),
        (True, True, 1, "error: rank 1 is gone\n"),
        pytest.param(False, False, 130, "", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_the_clean_up_neither_hides_nor_repeats_the_error(
    fails: bool, replaces: bool, code: int, error: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(fails=fails, replaces=replaces)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "BAGPIPE_TRACEBACK"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, error)
