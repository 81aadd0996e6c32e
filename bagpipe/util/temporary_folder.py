"""`temporary_folder`: a private folder of this process; those of killed processes are removed with the next.

<tmp>/bagpipe-x8k2/owner.lock     locked while the process lives; the kernel frees the lock when it is killed
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["temporary_folder"]

_PREFIX = "bagpipe-"
_LOCK = "owner.lock"


@contextmanager
def temporary_folder(purpose: str = "") -> Iterator[Path]:
    """A folder that only this user can read, removed at the end of the block.

    Args:
        purpose: part of its name.
    """
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    # Hidden from `_sweep` until it is locked.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{purpose}-" if purpose else f".{_PREFIX}", dir=parent))
    folder = parent / hidden.name.removeprefix(".")
    with (hidden / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove this user's folders whose processes have ended. Those without a lock are not ours to judge."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
