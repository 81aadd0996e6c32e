"""Process settings of a training process, the same for every job.

* Freed memory stays in the process, in one arena. By default glibc returns the pages of a large freed tensor and faults
  them in again for the next step. This cost one compute-only model 11 to 15 ms a step instead of 10. Pipelined steps
  measured so far (benchmarks/overlap, paper-91) are no faster with these settings.
* A thread waits at most `SWITCH_INTERVAL_S` for the interpreter lock (default: 5 ms). No effect on step times was
  measured.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = [
    "SWITCH_INTERVAL_S",
    "configure_device",
    "configure_process",
    "peak_rss_bytes",
]

SWITCH_INTERVAL_S = 0.5e-3

#: Parameters of mallopt(3), from malloc.h, and their values.
_MALLOC_OPTIONS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_ARENA_MAX": (-8, 1),
}


def configure_process() -> None:
    """Apply the settings. Call before large allocations."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    for parameter, value in _MALLOC_OPTIONS.values():
        mallopt(parameter, value)


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Peak resident set size of a process (VmHWM of proc(5)). The value of getrusage includes the parent's peak.

    Raises:
        FileNotFoundError: the process does not exist.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def configure_device(device: str, num_ranks: int) -> None:
    """Set the environment variables that CUDA reads when it initialises. Call before the first use of the device.

    cuBLAS is reproducible across runs with several streams only with a fixed workspace size (cuBLAS manual, "Results
    reproducibility"). torch allocates one workspace per thread and stream; the size here is the one the manual names.

    With several ranks a device runs one stream per lane and one per communicator. Streams that share one of the default
    8 hardware queues wait for each other's kernels. A communicator kernel that waits for a peer can then block the lane
    that the peer waits for. 32 is the maximum. Untested with two devices.
    """
    if not device.startswith("cuda"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_ranks > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
