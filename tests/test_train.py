"""`python -m bagpipe.train` is the training program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.multiproc
def test_the_training_program_parses_the_flags():
    command = [sys.executable, "-m", "bagpipe.train", "--data.batch_size", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --data.batch_size")
