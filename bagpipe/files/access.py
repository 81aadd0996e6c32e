"""Reading by path or URL: `open_file`, `file_version`, `is_file`, `is_folder`, `list_folder`, `join`.

A path with a scheme, such as `s3://bucket/day_0.tsv`, is a URL; any other is a local path. A local path costs one
comparison more than the system's own call. OSError is raised as the system does it, InputError where credentials or a
package are missing, or an object has changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, cast

from bagpipe.files.version import FileVersion

__all__ = [
    "EntryKind",
    "file_version",
    "forget",
    "is_file",
    "is_folder",
    "is_remote",
    "join",
    "list_folder",
    "open_file",
    "pin",
    "pins",
]


#: An entry of a folder, links followed: a file, a folder, a link to nothing, or another thing such as a socket.
EntryKind = Literal["file", "folder", "dangling", "other"]


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def open_file(path: str) -> BinaryIO:
    """Open a file to read its bytes.

    Raises:
        InputError, OSError: it cannot be opened; see the module.
    """
    if "://" not in path:
        return open(path, "rb")
    from bagpipe.files.remote import object_at
    from bagpipe.files.remote_file import RemoteFile

    return cast(BinaryIO, RemoteFile(object_at(path)))


def file_version(path: str) -> FileVersion:
    """The version of a file; of a remote object, the one that this process reads (`bagpipe.files.remote`).

    Raises:
        InputError, OSError: it does not exist or cannot be reached.
    """
    if "://" not in path:
        status = os.stat(path)
        return FileVersion(
            inode=status.st_ino,
            num_bytes=status.st_size,
            modified_ns=status.st_mtime_ns,
            changed_ns=status.st_ctime_ns,
        )
    from bagpipe.files.remote import object_at

    return object_at(path).version


def forget(path: str) -> None:
    """Let the next look at the remote objects below a path decide their versions: a job begins."""
    if "://" in path:
        from bagpipe.files import remote

        remote.forget(path)


def pins(paths: Sequence[str]) -> dict[str, FileVersion]:
    """The versions of the remote files among `paths` that this process reads, for `pin`."""
    if not any("://" in path for path in paths):
        return {}
    from bagpipe.files import remote

    known = remote.pins()
    return {path: known[path] for path in paths if path in known}


def pin(versions: Mapping[str, FileVersion]) -> None:
    """Let this process read these versions of remote files, and refuse others."""
    if versions:
        from bagpipe.files import remote

        remote.pin(versions)


def is_file(path: str) -> bool:
    """Whether there is a file. InputError: nobody can tell without credentials or a package."""
    if "://" not in path:
        return os.path.isfile(path)
    from bagpipe.files.remote import kind_of

    return kind_of(path) == "file"


def is_folder(path: str) -> bool:
    """Whether there is a folder; of an object store, whether a name begins with the path and a slash."""
    if "://" not in path:
        return os.path.isdir(path)
    from bagpipe.files.remote import kind_of

    return kind_of(path) == "directory"


def list_folder(path: str) -> dict[str, EntryKind]:
    """The entries of a folder by their names, in no order.

    Raises:
        InputError, OSError: it does not exist or cannot be listed.
    """
    if "://" not in path:
        with os.scandir(path) as entries:
            return {entry.name: _kind_of(entry) for entry in entries}
    from bagpipe.files.remote import entries_in

    return {name: "folder" if kind == "directory" else "file" for name, kind in entries_in(path).items()}


def _kind_of(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_file():
        return "file"
    if entry.is_dir():
        return "folder"
    return "other" if os.path.exists(entry.path) else "dangling"


def join(folder: str, name: str) -> str:
    """The path of a file of a folder."""
    return str(Path(folder) / name) if "://" not in folder else f"{folder.rstrip('/')}/{name}"
