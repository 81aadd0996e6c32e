"""On the device: torch's own sanitizer finds no race between lanes, and finds a seeded one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def sanitized(device: str, *without_wait: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.sanitized", device, *without_wait],
        cwd=ROOT,
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_no_race_in_direct_mode(cuda: str) -> None:
    done = sanitized(cuda)
    assert "CSAN detected" not in done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (0, "10 batches\n"), done.stderr


def test_a_missing_wait_is_detected(cuda: str) -> None:
    """The control for the test above."""
    done = sanitized(cuda, "compute", "copy")
    assert "CSAN detected a possible data race" in done.stderr, done.stderr
    assert done.returncode != 0
