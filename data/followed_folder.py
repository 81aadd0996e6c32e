"""`FollowedFolder`: the files of a folder that grows, as a stream. Each file is a source of its own.

    folder ──listings──> complete files in the order of their names ──one source each──> segments, places

A place names the file and its segment, so files before it may be removed. It also counts the files before it and
hashes their names: a resumed job refuses a folder where another file has appeared among them. And it has size and hash
of the file itself, of whose bytes the first and the last ones are hashed: another file of its name is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import xxhash

from bagpipe.client.agreement import first_difference
from bagpipe.config.ranges import seconds_of
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.files.data_folder import tell_left_out
from data.clock import with_times
from data.columns import Columns
from data.folder_listing import DONE, Entry, FollowRule, Listing, arrived, listed, order_key
from data.source import Block, Segment, Source
from data.stream import Arrived, ConfiguredStream

__all__ = ["FolderArrivals", "FollowedFolder", "entries_of"]

#: Bytes at either end of a file that its hash covers.
_END_BYTES = 64 << 10

#: Opens the source of one file.
Opener = Callable[[DataConfig, int], Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedFolder(ConfiguredStream):
    """A folder that grows.

    Attributes:
        name: its path.
        config: of the data.
        seed: see `Opener`.
        opener: of the format.
        rule: of complete files.
        parser: the source of the first file, whose columns all files have.
    """

    name: str
    config: DataConfig
    seed: int
    opener: Opener
    rule: FollowRule
    parser: Source

    @classmethod
    def at(cls, config: DataConfig, seed: int, opener: Opener, suffixes: tuple[str, ...] = ()) -> FollowedFolder:
        """The stream of a configuration.

        Args:
            config: the `data` section.
            seed: see `Opener`.
            opener: of the format.
            suffixes: ends of the names of its files; empty: any.

        Raises:
            InputError: there is no such folder, or no complete file in it.
        """
        rule = FollowRule(
            by_marker=config.follow == "marker",
            age_s=config.follow_age_s,
            until_s=seconds_of(config.until) if config.until else None,
            suffixes=suffixes,
        )
        found = listed(entries_of(config.path), rule, time.time())
        if not found.num_complete:
            wanted = f"with a marker {DONE}NAME" if rule.by_marker else f"unchanged for {rule.age_s:g} s"
            raise InputError(f"{config.path}: expected at least one complete file to begin with, {wanted}, got none")
        first = _source_of(opener, config, seed, os.path.join(config.path, found.files[0]))
        return cls(name=config.path, config=config, seed=seed, opener=opener, rule=rule, parser=first)

    @property
    def layout(self) -> str:
        return f"folder/{self.parser.layout}"

    def arrivals(self, place: Mapping[str, Any] | None) -> FolderArrivals:
        return FolderArrivals(self, place)

    def segments(self) -> tuple[Segment, ...]:
        found = listed(entries_of(self.name), self.rule, time.time())
        files = found.files[: found.num_complete]
        return tuple(segment for file in files for segment in self.source_of(file).segments())

    def blocks(self, segment: Segment) -> Iterator[Block]:
        return self._source_at(segment.file).blocks(segment)

    def read(self, block: Block) -> Columns:
        return self._source_at(block.file).read(block)

    def locate(self, block: Block, row: int) -> str:
        return self._source_at(block.file).locate(block, row)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return self._source_at(segment.file).count_rows(segment, at_most)

    def source_of(self, name: str) -> Source:
        """The source of a file of the folder.

        Raises:
            InputError: it cannot be read, or has other columns than the first file.
        """
        path = os.path.join(self.name, name)
        found = self._source_at(path)
        ours, theirs = (json.loads(json.dumps(item.schema.to_json())) for item in (self.parser, found))
        change = first_difference(ours, theirs)
        if change is not None:
            raise InputError(
                f"{path}: expected the columns of the first file, where {change.path} is {change.first}, "
                f"got {change.second}"
            )
        return found

    def _source_at(self, path: str) -> Source:
        return _source_of(self.opener, self.config, self.seed, path, self.reads_times)


@lru_cache(maxsize=64)
def _source_of(opener: Opener, config: DataConfig, seed: int, path: str, reads_times: bool = False) -> Source:
    found = opener(replace(config, path=path, follow="off", until="", stream_idle_s=0.0), seed)
    return with_times(found, config.format) if reads_times else found


def entries_of(folder: str) -> list[Entry]:
    """The entries of a folder.

    Raises:
        InputError: it cannot be listed.
    """
    entries: list[Entry] = []
    try:
        with os.scandir(folder) as found:
            for item in found:
                try:
                    is_file = item.is_file()
                    time_s = item.stat(follow_symlinks=is_file).st_mtime
                except FileNotFoundError:  # removed or renamed meanwhile
                    continue
                entries.append(Entry(name=item.name, modified_s=time_s, is_file=is_file))
    except OSError as error:
        raise InputError(f"data.path {folder}: expected a folder that grows: {error.strerror or error}") from None
    return entries


class FolderArrivals:
    """`data.stream.Arrivals` of a folder.

    Args:
        stream: the folder.
        place: where to begin; None: at the first file.
        entries: lists the folder.
        now: seconds since 1970.

    Raises:
        InputError: `place` is none of a folder, or its file is gone.
    """

    def __init__(
        self,
        stream: FollowedFolder,
        place: Mapping[str, Any] | None,
        *,
        entries: Callable[[str], list[Entry]] = entries_of,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.is_over = False
        self._stream = stream
        self._entries = entries
        self._now = now
        self._looked_s = float("-inf")
        self._taken: set[str] = set()
        self._last = ""
        self._num_files = 0
        self._names = hashlib.sha256().hexdigest()[:16]  # of the names taken, one after the other
        self._files: deque[str] = deque()
        self._segments: deque[Arrived] = deque()
        self._told: set[str] = set()  # entries that are left out
        if place is not None:
            self._begin_at(_checked(place, stream.name))

    def poll(self) -> Arrived | None:
        """See `data.stream.Arrivals`."""
        while not self._segments:
            if not self._files:
                self._look()
            if not self._files:
                return None
            self._open(self._files.popleft())
        return self._segments.popleft()

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """See `data.stream.Arrivals`."""
        return self._stream.blocks(segment)

    def end(self) -> None:
        """See `data.stream.Arrivals`."""
        self._look()
        self.is_over = not self._files

    def stop(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

    def _listing(self) -> Listing:
        return listed(self._entries(self._stream.name), self._stream.rule, self._now())

    def _look(self) -> None:
        """Look for files that are complete, unless that has just been done."""
        now = time.monotonic()
        if self.is_over or now - self._looked_s < self._stream.poll_s / 2:
            return
        self._looked_s = now
        first = self._listing()
        self._tell(first.left_out)
        files, self.is_over = arrived(first, self._listing(), self._taken, self._last, self._stream.name)
        self._files.extend(files)
        self._taken.update(files)
        self._last = files[-1] if files else self._last

    def _tell(self, left_out: tuple[str, ...]) -> None:
        """Say which entries are not read, each once."""
        suffixes = ", ".join(self._stream.rule.suffixes)
        reason = f"a stream is of files{f' ending in {suffixes}' if suffixes else ''}, without folders and copies"
        tell_left_out(self._stream.name, [name for name in left_out if name not in self._told], reason)
        self._told.update(left_out)

    def _open(self, name: str, first: int = 0) -> None:
        """The segments of a file, from number `first` on."""
        segments = self._stream.source_of(name).segments()
        num_bytes, content = _content_of(os.path.join(self._stream.name, name))
        for number, segment in enumerate(segments):
            if number >= first:
                place = {"file": name, "segment": number, "bytes": num_bytes, "content": content}
                place |= {"files": self._num_files, "names": self._names}
                self._segments.append(Arrived(segment=segment, place=place))
        self._count(name)

    def _count(self, name: str) -> None:
        self._num_files += 1
        self._names = hashlib.sha256(f"{self._names}/{name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def _begin_at(self, place: Mapping[str, Any]) -> None:
        folder, name = self._stream.name, str(place["file"])
        there = sorted((entry.name for entry in self._entries(folder) if entry.is_file), key=order_key)
        before = [other for other in listed_names(there, self._stream.rule) if order_key(other) < order_key(name)]
        path = os.path.join(folder, name)
        if name not in there:
            raise InputError(f"{path}: the position in the stream is in this file, expected it, got none")
        num_bytes, content = _content_of(path)
        if num_bytes != place["bytes"]:
            raise InputError(f"{path}: expected the {place['bytes']} bytes of the job so far, got {num_bytes}")
        if place.get("content", content) != content:  # places of earlier versions have none
            raise InputError(
                f"{path}: expected the content of the job so far, got other bytes in the first or last "
                f"{_END_BYTES >> 10} KiB: the file was replaced or changed"
            )
        for other in before:
            self._count(other)
        if self._num_files > place["files"] or (self._num_files == place["files"] and self._names != place["names"]):
            raise InputError(
                f"{folder}: expected the {place['files']} files that the job has read before {name}, got "
                f"{self._num_files}, not all of them the same: files are read in the order of their names, so give "
                f"later ones later names"
            )
        self._num_files, self._names = int(place["files"]), str(place["names"])
        self._taken.update(before, [name])
        self._last = name
        self._open(name, int(place["segment"]))
        if not self._segments:
            raise InputError(f"loader state: {path} has no segment {place['segment']}")


def _content_of(path: str) -> tuple[int, str]:
    """Size of a file, and hexadecimal XXH3-64 of its first and last `_END_BYTES`.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            hasher = xxhash.xxh3_64(file.read(_END_BYTES))
            file.seek(max(_END_BYTES, num_bytes - _END_BYTES))
            hasher.update(file.read(_END_BYTES))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    return num_bytes, hasher.hexdigest()


def listed_names(names: list[str], rule: FollowRule) -> tuple[str, ...]:
    """The names of data files, in reading order, whatever their times."""
    always = FollowRule(by_marker=False, age_s=0.0, suffixes=rule.suffixes)
    return listed([Entry(name=name, modified_s=0.0) for name in names], always, 0.0).files


def _checked(place: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    """A place that a stranger may have written. Raises InputError if it is none of a folder."""
    kinds = {"file": str, "segment": int, "bytes": int, "files": int, "names": str}
    if "content" in place:
        kinds["content"] = str
    for key, kind in kinds.items():
        if type(place.get(key)) is not kind:
            raise InputError(f"loader state: expected the place of a file of {folder}, got {str(dict(place))[:80]}")
    if os.path.basename(place["file"]) != place["file"] or place["segment"] < 0:
        raise InputError(f"loader state: expected the place of a file of {folder}, got {str(dict(place))[:80]}")
    return place
