from __future__ import annotations

import os
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
