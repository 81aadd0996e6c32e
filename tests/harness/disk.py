"""`SmallDisk`: a file system of a fixed size that a test can fill up and free again. Linux, needs root.

with SmallDisk(folder, num_bytes=4 << 20) as disk:
    disk.fill()        every later write fails with ENOSPC
    disk.free()        there is room again
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Self

from bagpipe.errors import InputError

__all__ = ["SmallDisk"]

_BALLAST = "ballast"
_CHUNK_BYTES = 1 << 16
_MNT_DETACH = 2


class SmallDisk:
    """Context manager: a tmpfs at `folder`. Its contents are lost on exit.

    Args:
        folder: an existing, empty folder.
        num_bytes: capacity.

    Raises:
        InputError: on `__enter__`, this process may not mount.
    """

    def __init__(self, folder: Path, *, num_bytes: int) -> None:
        self.folder = folder
        self._num_bytes = num_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Self:
        options = f"size={self._num_bytes},mode=700".encode()
        done = self._libc.mount(b"bagpipe", os.fsencode(self.folder), b"tmpfs", 0, options)
        if done != 0:
            reason = os.strerror(ctypes.get_errno())
            raise InputError(
                f"a disk of {self._num_bytes} bytes cannot be mounted at {self.folder}: {reason}; needs root"
            )
        return self

    def __exit__(self, *_: object) -> None:
        # Lazy unmount: a dying process can still have a file open there.
        if self._libc.umount2(os.fsencode(self.folder), _MNT_DETACH) != 0:
            raise OSError(ctypes.get_errno(), f"cannot unmount {self.folder}")

    @property
    def free_bytes(self) -> int:
        """Free space."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Fill the disk up to so many free bytes."""
        with (self.folder / _BALLAST).open("ab", buffering=0) as ballast:
            while (room := self.free_bytes - leave_bytes) > 0:
                try:
                    ballast.write(b"\1" * min(room, _CHUNK_BYTES))
                except OSError:  # others write here too
                    return

    def free(self) -> None:
        """Free the space again."""
        (self.folder / _BALLAST).unlink(missing_ok=True)
