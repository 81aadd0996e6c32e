"""`utf8_path`: files for libraries that take paths in UTF-8 only, which names of files need not be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["utf8_path"]


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """A path of the same file in UTF-8; the path itself if it is so. Other paths are valid inside the block only.

    Args:
        path: of a file. It may be new if its name is UTF-8, whatever its folder's is; it keeps this name.

    Raises:
        OSError: the path is not UTF-8, and its file or folder cannot be opened.
    """
    if _is_utf8(path):
        yield path
        return
    rest = path.name if _is_utf8(path.name) else "."
    descriptor = os.open(path if rest == "." else path.parent, os.O_PATH)
    try:
        yield Path("/proc/self/fd", str(descriptor), rest)
    finally:
        os.close(descriptor)


def _is_utf8(path: str | Path) -> bool:
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # Python has such bytes as halves of surrogate pairs
        return False
    return True
