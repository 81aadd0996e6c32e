"""The trainer's program: how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]

#: Ends the program with an error, or waits; a signal arrives during the clean-up, or while it waits.
_PROGRAM = """
import os, signal, sys
from bagpipe.errors import JobError
from trainer import cli

def run_job(*_, **__):
    try:
        if {fails}:
            raise JobError("rank 1 is gone")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

import trainer.job
trainer.job.run_job = run_job
sys.argv[1:] = ["--data.format", "synthetic", "--data.limit", "100"]
cli.main()
"""


@pytest.mark.parametrize(("fails", "code", "error"), [(True, 1, "error: rank 1 is gone\n"), (False, 130, "")])
def test_a_signal_during_the_clean_up_does_not_hide_the_error(fails: bool, code: int, error: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "BAGPIPE_TRACEBACK"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(fails=fails)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, error)
