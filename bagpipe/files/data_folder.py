"""`data_folder`: the files of a folder that holds data, in the order in which they are read, and what is not read.

part-2.parquet  part-10.parquet         read, in natural order of the paths
dt=2026-11-27/part-0.parquet            read: folders named KEY=VALUE, which are Hive's partitions
_SUCCESS  .part-2.parquet.crc           not looked at, as Spark and Hive do: names that begin with _ or a dot
old/part-0.parquet  a socket            left out, and `tell_left_out` says so
part-2.parquet.bak  part-2.parquet~     copies of what is read: left out in the same way
part-3.parquet -> nothing               refused: a link to nothing
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from bagpipe.errors import InputError
from bagpipe.files.access import EntryKind, is_remote, join, list_folder

__all__ = [
    "DataFolder",
    "copies",
    "data_folder",
    "is_partition",
    "look_at",
    "natural_key",
    "path_key",
    "shown_names",
    "tell_left_out",
]

#: Looks at remote files and folders at the same time: each waits for an answer.
_NUM_LOOKS = 16

#: Names in one message.
_MAX_NAMES = 5

#: What follows another file's name in that of a further part, rather than of a copy: a number or a date.
_PART = re.compile(r"\.\d[\d.:_TZ-]*(\.gz)?")

_LOG = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """The content of a folder. Paths begin in the folder, with a slash between names.

    Attributes:
        files: paths of the data files, in reading order.
        left_out: paths of what is no file and no partition, ascending; folders end in a slash.
        copies: paths of copies of files, ascending (`copies`).
        hidden: paths whose last name begins with an underscore or a dot.
    """

    files: tuple[str, ...]
    left_out: tuple[str, ...]
    copies: tuple[str, ...]
    hidden: tuple[str, ...]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that orders day_2 before day_10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts if part]


def path_key(path: str) -> tuple[list[list[tuple[int, int, str]]], str]:
    """Sort key of paths: natural order of each name in them, and one order for those that are equal in it."""
    return [natural_key(name) for name in path.split("/")], path


def is_partition(name: str) -> bool:
    """Whether a folder's name is KEY=VALUE."""
    return name.find("=") > 0


def copies(paths: Iterable[str]) -> frozenset[str]:
    """Those of the paths that append something to another's: `a.csv.bak`, `a.csv~`, `a.csv.gz` beside `a.csv`.

    A number or a date makes no copy: logs are rotated to `a.csv.1` and `a.csv.2026-11-27.gz`.
    """
    known = frozenset(paths)

    def is_copy(path: str) -> bool:
        ends = [match.start() for match in re.finditer(r"[.~]", path)]
        return any(path[:end] in known and not _PART.fullmatch(path, end) for end in ends)

    return frozenset(filter(is_copy, known))


def data_folder(path: str) -> DataFolder:
    """The content of a folder, with that of its partitions.

    Raises:
        InputError: a folder cannot be listed or contains itself, or there is a link to nothing.
    """
    files: list[str] = []
    left_out: list[str] = []
    hidden: list[str] = []
    level = [("", frozenset[str]())]
    while level:
        entries = look_at(lambda item: _list(path, *item), level, at_once=is_remote(path))
        following = []
        for (folder, above), (own, found) in zip(level, entries, strict=True):
            for name, kind in found.items():
                place = f"{folder}/{name}" if folder else name
                if name.startswith((".", "_")):
                    hidden.append(place)
                elif kind == "file":
                    files.append(place)
                elif kind == "dangling":
                    raise InputError(f"{join(path, place)}: expected a file, got a link to nothing")
                elif kind == "folder" and is_partition(name):
                    following.append((place, above | {own}))
                else:
                    left_out.append(f"{place}/" if kind == "folder" else place)
        level = following
    found_copies = copies(files)
    return DataFolder(
        files=tuple(sorted(set(files) - found_copies, key=path_key)),
        left_out=tuple(sorted(left_out)),
        copies=tuple(sorted(found_copies)),
        hidden=tuple(sorted(hidden)),
    )


def _list(path: str, folder: str, above: frozenset[str]) -> tuple[str, dict[str, EntryKind]]:
    """A folder's own place without links, and its entries. `above`: the places of the folders it lies in."""
    where = join(path, folder) if folder else path
    own = where if is_remote(path) else os.path.realpath(where)
    if own in above:
        raise InputError(f"{where}: expected a folder of data files, got a link to a folder that it lies in")
    try:
        return own, list_folder(where)
    except OSError as error:
        raise InputError(f"cannot read {where}: {error.strerror or error}") from None


def look_at(function: Callable[[_Item], _Result], items: Sequence[_Item], *, at_once: bool) -> list[_Result]:
    """The results of a function for each item, in order. The first error, in that order, is raised.

    Args:
        function: looks at an item.
        items: any number.
        at_once: several at the same time, because each look waits for a store.
    """
    if len(items) < 2 or not at_once:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_NUM_LOOKS, len(items)), thread_name_prefix="looks") as pool:
        return list(pool.map(function, items))


def tell_left_out(path: str, names: Iterable[str], reason: str) -> None:
    """Say in one line what of a folder is not read; nothing if that is nothing.

    Args:
        path: of the folder.
        names: in the folder.
        reason: why.
    """
    found = list(names)
    if found:
        _LOG.warning("%s: left out: %s (%s)", path, shown_names(found), reason)


def shown_names(names: Sequence[str]) -> str:
    """The first of the names, and how many there are more."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
