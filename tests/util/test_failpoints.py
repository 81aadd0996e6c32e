"""A process dies exactly at the armed pass of the armed failpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

_REACHES = """
from bagpipe.util.failpoints import hit
for number in range(3):
    hit("after-fetch")
    hit("after-commit")
    print(number, flush=True)
"""


def run(crash_at: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BAGPIPE_CRASH_AT": crash_at}
    return subprocess.run([sys.executable, "-c", _REACHES], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("crash_at", "printed", "status"),
    [
        ("", "0\n1\n2\n", 0),
        ("after-commit", "", -signal.SIGKILL),
        ("after-commit:3", "0\n1\n", -signal.SIGKILL),
        ("after-fetch:4", "0\n1\n2\n", 0),
        ("after-fetch:2:SIGTERM", "0\n", -signal.SIGTERM),
    ],
)
def test_the_nth_time_is_the_last(crash_at: str, printed: str, status: int) -> None:
    done = run(crash_at)
    assert (done.stdout, done.returncode) == (printed, status)


def test_an_unknown_point_is_refused() -> None:
    done = run("sometime:1")
    assert done.returncode == 1
    assert "expected one of after-fetch" in done.stderr
