from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

#: Program of a launcher and its child. The child waits in the block, or after it, until its stdin ends.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0)
print(rank.pid, flush=True)
rank.wait()
"""
RANK = """
import sys
from bagpipe.distributed.launcher import following_launcher
def wait():
    sys.stderr.write("waits")
    sys.stderr.flush()
    sys.stdin.read()
with following_launcher():
    if {within}:
        wait()
if not {within}:
    wait()
sys.stderr.write(" ends")
"""


@pytest.mark.parametrize("within", [True, False])
def test_a_rank_that_waits_for_others_dies_with_its_launcher(within: bool) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK.format(within=within)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1"},
    )
    with launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        rank = os.pidfd_open(int(launcher.stdout.readline()))
        said = launcher.stderr.read(5)
        launcher.kill()
        if within:
            assert select.select([rank], [], [], 60)[0]
        launcher.stdin.close()
        assert select.select([rank], [], [], 60)[0]
        os.close(rank)
        assert (said + launcher.stderr.read()).decode() == ("waits" if within else "waits ends")
