"""Copies between local files and URLs, for mirrors: `put_file`, `put_bytes`, `get_file`, `get_bytes`, `copy`, `remove`,
`files_below`.

Each is retried as reads are. An upload appears under its name when it is whole: object stores have no half objects.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from bagpipe.files.remote import file_system, retried

__all__ = ["copy", "files_below", "get_bytes", "get_file", "put_bytes", "put_file", "remove"]


def put_file(local: Path, url: str) -> None:
    """Upload a file.

    Raises:
        InputError, OSError: as `bagpipe.files.remote.retried`.
    """
    system, path = file_system(url)
    retried(url, lambda: system.put_file(str(local), path))


def put_bytes(content: bytes, url: str) -> None:
    """Upload a small file. Raises as `put_file`."""
    system, path = file_system(url)
    retried(url, lambda: system.pipe_file(path, content))


def get_file(url: str, local: Path) -> None:
    """Download a file. Raises as `put_file`; FileNotFoundError if there is none."""
    system, path = file_system(url)
    retried(url, lambda: system.get_file(path, str(local)))


def get_bytes(url: str) -> bytes:
    """The content of a small file. Raises as `get_file`."""
    system, path = file_system(url)
    content: bytes = retried(url, lambda: system.cat_file(path))
    return content


def copy(source: str, target: str) -> None:
    """Copy a file within one store, without a download. Raises as `get_file`."""
    system, path = file_system(source)
    _, other = file_system(target)
    retried(source, lambda: system.cp_file(path, other))


def remove(url: str) -> None:
    """Remove a file, if it is there. Raises as `put_file`."""
    system, path = file_system(url)
    with suppress(FileNotFoundError):
        retried(url, lambda: system.rm_file(path))


def files_below(url: str) -> list[str]:
    """Paths of all files below a folder, relative to it; none if it does not exist. Raises as `put_file`."""
    system, path = file_system(url)
    try:
        found: list[str] = retried(url, lambda: system.find(path))
    except FileNotFoundError:
        return []
    start = path.rstrip("/") + "/"
    return [name[len(start) :] for name in found if name.startswith(start)]
