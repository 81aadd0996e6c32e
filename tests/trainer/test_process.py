from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.process import SWITCH_INTERVAL_S, settle_device

#: In a process of its own: the settings are for good. mallopt answers 1 when it takes a value.
PROGRAM = """
import ctypes, sys
from trainer import process
process.settle_process()
mallopt = ctypes.CDLL(None).mallopt
print(sys.getswitchinterval(), [mallopt(*option) for option in process._MALLOC_OPTIONS.values()])
"""


def test_the_settings_are_taken() -> None:
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
    settle_device(device, num_ranks)
    assert os.environ.get(name) == after
