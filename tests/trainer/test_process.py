from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from trainer.process import SWITCH_INTERVAL_S, configure_device

#: Runs in its own process because the settings are permanent. mallopt returns 1 when it accepts a value.
PROGRAM = """
import ctypes, sys
from trainer import process
process.configure_process()
mallopt = ctypes.CDLL(None).mallopt
print(sys.getswitchinterval(), [mallopt(*option) for option in process._MALLOC_OPTIONS.values()])
"""

#: Holds 200 MB, then starts a process that holds little.
LARGE_PARENT = """
import subprocess, sys
held = bytearray(200_000_000)
small = "from trainer.process import peak_rss_bytes; print(peak_rss_bytes())"
sys.exit(subprocess.call([sys.executable, "-c", small]))
"""

#: Program of a launcher and its child. The child waits in the block, or after it, until its stdin ends.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0)
print(rank.pid, flush=True)
rank.wait()
"""
RANK = """
import sys
from trainer.process import following_launcher
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


def test_process_settings_are_applied() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(SWITCH_INTERVAL_S), "[1,", "1,", "1,", "1]"]


@pytest.mark.parametrize(
    ("device", "num_ranks", "before", "after"),
    [("cuda", 2, None, "32"), ("cuda", 2, "8", "8"), ("cuda", 1, None, None), ("cpu", 2, None, None)],
)
def test_hardware_queues_of_several_ranks(
    device: str, num_ranks: int, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set already
    configure_device(device, num_ranks)
    assert os.environ.get(name) == after


@pytest.mark.parametrize(
    ("device", "before", "after"), [("cuda:1", None, ":4096:8"), ("cuda", ":16:8", ":16:8"), ("cpu", None, None)]
)
def test_cublas_has_a_fixed_workspace(
    device: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    configure_device(device, 1)
    assert os.environ.get(name) == after


def test_the_peak_of_memory_is_this_process_s_own() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE_PARENT], stdout=subprocess.PIPE, text=True, check=True)
    assert 1_000_000 < int(done.stdout) < 150_000_000


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
