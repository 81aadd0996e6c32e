"""The files of a folder that grows: which of them are complete, in which order, and whether more can come.

    names, times of modification ──listed──> data files in natural order, so many of them complete, over or not
    two listings, files taken ──arrived──> files that can be read next

    day_0  day_1  day_2  day_10    data files, in the order in which they are read
    _DONE.day_0                    marks day_0 as complete (marker)
    _END or _SUCCESS               everything there is complete, and nothing more comes
    .day_3.tmp  _day_3             not looked at
    day_4/  day_5 -> nothing       left out: folders, links to nothing, and files of other names than the rule's
    day_0.bak  day_0~              left out: copies (`bagpipe.files.data_folder.copies`)

A file that is not complete holds back those after it, so files may become complete in any order. They must appear in
the order of their names: a file that appears before one that was taken is refused. Pure: no clock, no file is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile

from bagpipe.errors import InputError
from bagpipe.files.data_folder import copies, natural_key

__all__ = ["DONE", "ENDS", "Entry", "FollowRule", "Listing", "arrived", "listed", "order_key"]

#: Before the name of a file that is complete.
DONE = "_DONE."
#: Files that end a folder.
ENDS = ("_END", "_SUCCESS")

#: Seconds after the end of a stream's time until all markers of that time are seen: times of files are rounded.
_CLOCK_S = 1.0

#: Seconds after which an entry that nothing changes keeps its name.
_SETTLED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the folder.

    Attributes:
        name: in the folder.
        modified_s: last modification of a file, in seconds since 1970.
        is_file: it is a file, or a link to one.
    """

    name: str
    modified_s: float
    is_file: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRule:
    """The completeness of a file.

    Attributes:
        by_marker: it has a marker; else its age decides.
        age_s: without a marker: seconds since the last modification.
        until_s: seconds since 1970; None: all is read. Without markers the first file that is modified later ends the
            folder, or a resumed job would find other files before its place. Later markers do not count.
        suffixes: ends of the names of data files, in small letters; empty: any.
    """

    by_marker: bool
    age_s: float
    until_s: float | None = None
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A folder at a time.

    Attributes:
        files: names of the data files, in reading order.
        num_complete: so many of them, from the first on, can be read.
        is_over: no file is to be added.
        left_out: names of other visible entries, without those that change: writers rename files when they are whole.
    """

    files: tuple[str, ...]
    num_complete: int
    is_over: bool
    left_out: tuple[str, ...] = ()


def order_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key of names: natural order (day_2 before day_10), and one order for names that are equal in it."""
    return natural_key(name), name


def listed(entries: Iterable[Entry], rule: FollowRule, now_s: float) -> Listing:
    """The listing of these entries at this time, in seconds since 1970."""
    until_s = float("inf") if rule.until_s is None else rule.until_s
    entries = list(entries)
    names = {entry.name for entry in entries if entry.modified_s <= until_s}
    visible = sorted((each for each in entries if _is_visible(each.name)), key=lambda entry: order_key(entry.name))
    data = {entry.name for entry in visible if _is_data(entry, rule)}
    data -= copies(data)
    files = [entry for entry in visible if entry.name in data]
    others = [entry for entry in visible if entry.name not in data]
    if not rule.by_marker:  # of marked files the time of the marker counts
        files = list(takewhile(lambda entry: entry.modified_s <= until_s, files))
    has_ended = not names.isdisjoint(ENDS)
    is_late = now_s >= until_s + (_CLOCK_S if rule.by_marker else rule.age_s)
    if is_late and rule.by_marker and not has_ended:  # the others were not marked in time
        files = [entry for entry in files if DONE + entry.name in names]
    num_complete = 0
    for entry in files:
        is_complete = DONE + entry.name in names if rule.by_marker else now_s - entry.modified_s >= rule.age_s
        if not (is_complete or has_ended):
            break
        num_complete += 1
    is_over = has_ended or is_late
    return Listing(
        files=tuple(entry.name for entry in files),
        num_complete=num_complete,
        is_over=is_over,
        left_out=tuple(entry.name for entry in others if is_over or now_s - entry.modified_s >= _SETTLED_S),
    )


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _is_data(entry: Entry, rule: FollowRule) -> bool:
    return entry.is_file and entry.name.lower().endswith(rule.suffixes or "")


def arrived(first: Listing, second: Listing, taken: Collection[str], last: str, folder: str) -> tuple[list[str], bool]:
    """The complete files that can be read after those taken, and whether no other file follows.

    A listing is not made at one moment: it can show a file and miss one that appeared before it. The second listing,
    made after the first, shows that one.

    Args:
        first, second: one after the other.
        taken: names of the files read so far.
        last: name of the latest of them; empty: none.
        folder: in messages.

    Raises:
        InputError: a file appeared before one that was taken.
    """
    for name in second.files:
        if last and name not in taken and order_key(name) < order_key(last):
            raise InputError(
                f"{folder}/{name}: appeared after {last} was read: files are read in the order of their names, "
                f"so give it a later name"
            )
    rest = [name for name in second.files if name not in taken]
    found: list[str] = []
    for name, other in zip(
        (name for name in first.files[: first.num_complete] if name not in taken), rest, strict=False
    ):
        if name != other:
            break
        found.append(name)
    return found, first.is_over and len(found) == len(rest)
