"""`open_shared_file`: memory that two processes share, as a file without a name."""

from __future__ import annotations

import os

from bagpipe.util.temporary_folder import temporary_file

__all__ = ["open_shared_file"]


def open_shared_file(num_bytes: int) -> int:
    """File descriptor of an empty file in memory, without a name. Close it after use."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("bagpipe")
    else:
        with temporary_file() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
