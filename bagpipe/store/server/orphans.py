"""`signal_writer`: a signal for the server that a killed job has left behind, and for no other process."""

from __future__ import annotations

import os
import signal
from typing import IO

__all__ = ["process_id_in", "signal_writer"]

#: Digits of the largest process id of Linux.
_MAX_DIGITS = 7


def process_id_in(text: bytes) -> int:
    """Process id that a lock file names; 0 if it names none."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0


def signal_writer(process_id: int, log: IO[bytes], number: signal.Signals) -> bool:
    """Send a signal to a process whose output is `log`. False, and no signal, if this is another process.

    A lock file can name a process that has ended, and whose number another one has now. Needs Linux; elsewhere False.
    """
    if not process_id or not hasattr(os, "pidfd_open"):
        return False
    try:
        process = os.pidfd_open(process_id)
    except OSError:
        return False
    try:
        # The descriptor stands for one process, whatever becomes of its number: looked at now, signalled next.
        if not os.path.samestat(os.stat(f"/proc/{process_id}/fd/1"), os.fstat(log.fileno())):
            return False
        signal.pidfd_send_signal(process, number)
    except OSError:
        return False
    finally:
        os.close(process)
    return True
