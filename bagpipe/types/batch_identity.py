"""`BatchIdentity`: what a cacher's batches depend on besides the settings: its code, and the files by content.

    file of n bytes ──sampled_blocks, sections──> byte ranges ──digests──> FileIdentity
    a checkpoint's or an earlier Welcome's, and this one ──first_change──> the file and the difference, or None

Files are compared by position, size and content, not by name or time: they can be touched, copied and moved.
`cacher.identity` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from bagpipe.errors import InputError

__all__ = ["TAG", "BatchIdentity", "FileIdentity", "sampled_blocks", "sections"]

#: Begins the only `sampled` digest of a remote file, which is its ETag.
TAG = "etag:"

#: Blocks, and sections, of a file. All these numbers are part of a checkpoint's meaning: another value needs a new
#: format version of the manifest.
_NUM_BLOCKS = 16
#: Bytes sampled of one file, and of all files together unless there are more than `_MAX_BYTES / _MIN_FILE_BYTES`.
_MAX_FILE_BYTES = 64 << 20
_MIN_FILE_BYTES = 64 << 10
_MAX_BYTES = 1 << 30


def sampled_blocks(num_bytes: int, num_files: int) -> list[range]:
    """Ranges of bytes that represent a file: all of it if it is small enough, else evenly spread blocks.

    Args:
        num_bytes: size of the file.
        num_files: files of the data set, at least 1. They share 1 GiB; each gets a power of two from 64 KiB to 64 MiB.
    """
    share = max(_MIN_FILE_BYTES, min(_MAX_FILE_BYTES, _MAX_BYTES // num_files))
    block_bytes = (1 << (share.bit_length() - 1)) // _NUM_BLOCKS
    if num_bytes <= block_bytes * _NUM_BLOCKS:
        return [range(start, min(start + block_bytes, num_bytes)) for start in range(0, num_bytes, block_bytes)]
    last = num_bytes - block_bytes
    starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
    return [range(start, start + block_bytes) for start in starts]


def sections(num_bytes: int) -> list[range]:
    """Ranges of bytes that divide a file into equal parts."""
    bounds = [num_bytes * number // _NUM_BLOCKS for number in range(_NUM_BLOCKS + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of one file.

    Attributes:
        name: its path, for messages only.
        num_bytes: its size.
        sampled: digests of `sampled_blocks`; of a remote file, `TAG` and its ETag.
        sections: digests of `sections`; empty if they were not asked for, or the sampled blocks are the whole file.
    """

    name: str
    num_bytes: int
    sampled: tuple[str, ...]
    sections: tuple[str, ...] = ()

    def has_content_of(self, other: FileIdentity) -> bool:
        """Whether both are the same bytes, as far as both are known."""
        known = not self.sections or not other.sections or self.sections == other.sections
        return self.num_bytes == other.num_bytes and self.sampled == other.sampled and known

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "sampled": " ".join(self.sampled),
            "sections": " ".join(self.sections),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`. Raises KeyError, TypeError, AttributeError or ValueError for other values."""
        return cls(
            name=value["name"],
            num_bytes=int(value["num_bytes"]),
            sampled=tuple(value["sampled"].split()),
            sections=tuple(value["sections"].split()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIdentity:
    """Identity of a cacher's batches, given the settings.

    Attributes:
        code: digest of the code of readers, oracle and cacher.
        layout: `data.source.Source.layout`.
        files: the files, in the order in which they are read.
    """

    code: str
    layout: str
    files: tuple[FileIdentity, ...]

    @property
    def size(self) -> str:
        """Number and total size of the files, as manifests of format version 1 begin the identity of the data."""
        return f"{len(self.files)} files of {sum(file.num_bytes for file in self.files)} bytes"

    def first_change(self, later: BatchIdentity) -> str | None:
        """First difference of the data of `later`, as a clause about it; None if none is known."""
        if self.layout != later.layout:
            return f"it is read as {later.layout!r}, not as {self.layout!r}"
        if len(self.files) != len(later.files):
            return f"it has {later.size}, not {self.size}"
        for before, after in zip(self.files, later.files, strict=True):
            if not before.has_content_of(after):
                return self._change_of_file(before, after)
        return None

    def knows_less_than(self, later: BatchIdentity) -> bool:
        """Whether `later` has digests of whole files that this lacks."""
        pairs = zip(self.files, later.files, strict=True)
        return any(after.sections and not before.sections for before, after in pairs)

    def _change_of_file(self, before: FileIdentity, after: FileIdentity) -> str:
        moved = next((file.name for file in self.files if file.has_content_of(after)), None)
        was = f" (then {before.name})" if before.name != after.name else ""
        if moved is not None:
            return f"{after.name}{was} has the content that {moved} had"
        if before.num_bytes != after.num_bytes:
            return f"{after.name}{was} has {after.num_bytes} bytes, not {before.num_bytes}"
        tags = [" ".join(each.sampled).removeprefix(TAG) for each in (before, after)]
        if any(each.sampled[:1] and each.sampled[0].startswith(TAG) for each in (before, after)):
            return f"{after.name}{was} has another etag, {tags[1][:80]}, not {tags[0][:80]}"
        block = _first_changed(before.sampled, after.sampled, sampled_blocks(after.num_bytes, len(self.files)))
        block = block or _first_changed(before.sections, after.sections, sections(after.num_bytes))
        where = f"the block at byte {block.start}, of {len(block)} bytes," if block is not None else "a block"
        return f"{after.name}{was} has other content: {where} differs"

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "layout": self.layout, "files": [file.to_json() for file in self.files]}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Inverse of `to_json`.

        Raises:
            InputError: the value is something else.
        """
        try:
            assert isinstance(value, Mapping)
            files = tuple(FileIdentity.from_json(file) for file in value["files"])
            return cls(code=str(value["code"]), layout=str(value["layout"]), files=files)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            raise InputError("the identity of the data cannot be read") from None


def _first_changed(before: tuple[str, ...], after: tuple[str, ...], blocks: list[range]) -> range | None:
    """The first block whose digests differ; None if there is none, or digests are missing."""
    if not before or not after:
        return None
    return next((block for one, other, block in zip(before, after, blocks, strict=False) if one != other), None)
