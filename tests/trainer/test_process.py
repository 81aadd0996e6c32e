from __future__ import annotations

import subprocess
import sys

from trainer.process import SWITCH_INTERVAL_S

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
