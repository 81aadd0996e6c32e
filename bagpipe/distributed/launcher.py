"""A rank that does not outlive its launcher (torchrun): the kernel sends it a signal when the launcher dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["follow_launcher", "following_launcher"]

#: From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def follow_launcher(number: signal.Signals = signal.SIGTERM) -> None:
    """Receive this signal when the launcher dies, so that the process does not outlive it.

    Used by a job of one rank, which then stops cleanly. Several ranks detect the loss by themselves, because the
    launcher hosts their key-value store, but not during the rendezvous (`following_launcher`).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != launcher:  # the launcher died before prctl took effect
        os.kill(os.getpid(), number)


@contextmanager
def following_launcher() -> Iterator[None]:
    """Receive SIGKILL if the launcher dies inside the block. Used before the process holds any state."""
    follow_launcher(signal.SIGKILL)
    yield
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
