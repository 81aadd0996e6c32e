"""Settings of a training process, the same for every job.

* Freed memory stays with the process, in one arena. By default glibc gives a large tensor's pages back when it is freed
  and faults them in again for the next step: one compute-only model took 11 to 15 ms a step instead of 10. Pipelined
  steps measured so far (benchmarks/overlap, paper-91) were no faster with these settings than without.
* A thread that wants the interpreter waits at most `SWITCH_INTERVAL_S` for one that does not let go (default: 5 ms). No
  effect on step times was measured.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "SWITCH_INTERVAL_S",
    "follow_launcher",
    "following_launcher",
    "peak_rss_bytes",
    "settle_device",
    "settle_process",
]

SWITCH_INTERVAL_S = 0.5e-3

#: From linux/prctl.h.
_PR_SET_PDEATHSIG = 1

#: Parameters of mallopt(3), from malloc.h, and their values.
_MALLOC_OPTIONS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
    "M_ARENA_MAX": (-8, 1),
}


def settle_process() -> None:
    """Apply the settings; before anything large is allocated."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc, with habits of its own
        return
    for parameter, value in _MALLOC_OPTIONS.values():
        mallopt(parameter, value)


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Largest resident size of a process so far. FileNotFoundError if it is gone.

    From proc(5): getrusage's figure begins with that of the process which started it.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def follow_launcher(number: signal.Signals = signal.SIGTERM) -> None:
    """End by this signal when the launcher is gone: nobody would hear of the result, or end this process.

    For a job's only rank; it stops cleanly. Several ranks hear of it at once, because the launcher has their key-value
    store, but not while they wait there for each other: until they have met, see `following_launcher`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != launcher:  # it was gone before it could be followed
        os.kill(os.getpid(), number)


@contextmanager
def following_launcher() -> Iterator[None]:
    """Be killed if the launcher dies inside the block, in which nothing is at stake yet."""
    follow_launcher(signal.SIGKILL)
    yield
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def settle_device(device: str, num_ranks: int) -> None:
    """Settings that CUDA reads when it starts; before anything touches the device.

    cuBLAS promises the same bits from run to run beside other streams only where its workspace is fixed (its manual,
    "Results reproducibility"). torch gives it one for each thread and stream; the size here is the one named there.

    With several ranks a device runs its lanes' streams and a stream of each communicator's. Streams that share one of
    the default 8 hardware queues wait for each other's kernels, and a communicator's kernel that waits for a peer may
    then hold up the lane that the peer waits for. 32 is the most there are. Untested: no machine with two devices.
    """
    if not device.startswith("cuda"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_ranks > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
