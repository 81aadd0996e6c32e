"""`end_with_parent`: ends a worker process with the process that started it, however that one ends."""

from __future__ import annotations

import multiprocessing
import os
import threading

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """From now on, end this process of a pool when its parent has ended, a killed one included. Returns at once."""
    threading.Thread(target=_wait, name="parent", daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
