"""Text files as segments and blocks of whole lines.

    plain file ──byte ranges cut at line ends──> one segment each, one block each
    gzip file  ──one stream──> one segment, blocks that carry their text

The first bytes tell whether a file is compressed, whatever its name.

Header lines are neither rows nor part of a segment. Folders are read in natural order: day_0, day_1, …, day_10
(`bagpipe.files.data_folder`).
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from bagpipe.errors import InputError
from bagpipe.files.access import is_file, is_folder, is_remote, join, open_file
from bagpipe.files.compression import START_BYTES, compression_of, inflated
from bagpipe.files.data_folder import DataFolder, data_folder, look_at, tell_left_out
from data.conversion_state import MANIFEST, check_finished
from data.source import Block, FileVersion, Segment, file_version

__all__ = [
    "BLOCK_BYTES",
    "MAX_LINE_BYTES",
    "TextSource",
    "count_segment",
    "first_line",
    "list_files",
    "locate_line",
    "read_text",
    "segments_of_files",
    "text_blocks",
    "text_segments",
    "whole_folder",
]

#: Text in a block. 4 MiB is 14,000 to 20,000 lines of Criteo: 25 ms of parsing keep workers busy on small files,
#: and about 7 MB of parsed columns, which makes a few blocks in flight cheap.
BLOCK_BYTES = 4 << 20

#: A line must fit into memory several times. A line of Criteo has about 300 bytes.
MAX_LINE_BYTES = 16 << 20

_ONLY_A_HEADER = "the file holds nothing but its header, expected lines of data"

_NO_PARTITIONS = "of a folder, its files are read and those of its partitions, folders named KEY=VALUE"

#: Folders in which a table's format says which of its files count.
_TABLE_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}

_LOG = logging.getLogger("bagpipe.data")

_HEADER_BYTES = 4096  # more if the first line is longer
_SCAN_BYTES = 1 << 20


class TextSource:
    """The common part of text sources; see `data.source.Source`. A format adds the rest, and `block_bytes`."""

    __slots__ = ()

    block_bytes: int

    @property
    def in_processes(self) -> bool:
        return True

    @property
    def multi_hot(self) -> frozenset[str]:
        return frozenset()

    def blocks(self, segment: Segment) -> Iterator[Block]:
        return text_blocks(segment, self.block_bytes)

    def locate(self, block: Block, row: int) -> str:
        return locate_line(block, row)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return count_segment(segment, at_most)


def list_files(path: str) -> tuple[str, ...]:
    """The file at `path`, or the data files of that folder and its partitions, in reading order (`data_folder`).

    Raises:
        InputError: the path does not exist, or the folder has no data file or a link to nothing, or its conversion has
            not ended.
    """
    if not path:
        raise InputError("data.path is empty: name a file or a folder")
    if not is_folder(path):
        if not is_file(path):
            raise InputError(f"data.path {path}: no such file or folder")
        return (path,)
    found = whole_folder(path)
    tell_left_out(path, found.left_out, _NO_PARTITIONS)
    if not found.files:
        folders = ", ".join(found.left_out[:5])
        raise InputError(
            f"{path}: the folder holds no data file{f', only {folders}: name one of them' if folders else ''}"
        )
    return tuple(join(path, name) for name in found.files)


def whole_folder(path: str) -> DataFolder:
    """The content of a folder of data.

    Raises:
        InputError: as `data_folder`, or a conversion into it or a partition has not ended.
    """
    found = data_folder(path)
    tell_left_out(path, found.copies, "copies, by their names, of files that are read")
    for name in found.hidden:
        folder, _, last = name.rpartition("/")
        where = join(path, folder) if folder else path
        if last == MANIFEST:
            check_finished(where)
        elif last in _TABLE_LOGS:
            _LOG.warning(
                "%s: a table of %s: its files are read as they are, also those that %s says are removed",
                where,
                _TABLE_LOGS[last],
                last,
            )
    return found


def is_gzip(file: str) -> bool:
    """Whether a text is a gzip stream, by its first bytes.

    Raises:
        InputError: it is compressed in another way, or UTF-16.
        OSError: it cannot be read.
    """
    return _is_gzip(file, file_version(file))


@lru_cache(maxsize=4096)
def _is_gzip(file: str, version: FileVersion) -> bool:
    del version  # part of the cache key only
    with open_file(file) as stream:
        start = stream.read(START_BYTES)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{file}: expected UTF-8 text, got UTF-16")
    kind = compression_of(start)
    if kind not in ("", "gzip"):
        raise InputError(f"{file}: expected text, plain or compressed by gzip, got a file compressed by {kind}")
    return kind == "gzip"


def first_line(file: str) -> bytes:
    """The first line of a file, with its line end.

    Raises:
        InputError: as in `text_segments`.
    """
    try:
        if file_version(file).num_bytes == 0:
            raise InputError(f"{file}: the file is empty, expected lines of text")
        if is_gzip(file):
            text = read_text(next(_gzip_blocks(file, _HEADER_BYTES)))
            return text[: (text.find(b"\n") + 1) or len(text)]
        with open_file(file) as stream:
            line = stream.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    if len(line) > MAX_LINE_BYTES:
        raise _long_line(file, 1)
    return line


def segments_of_files(files: Sequence[str], block_bytes: int, *, header: bool = False) -> tuple[Segment, ...]:
    """`text_segments` of several files, in order.

    Raises:
        InputError: as `text_segments`.
    """
    find = partial(text_segments, block_bytes=block_bytes, header=header)
    found = look_at(find, files, at_once=is_remote(files[0]))
    return tuple(segment for segments in found for segment in segments)


def text_segments(file: str, block_bytes: int, *, header: bool = False) -> tuple[Segment, ...]:
    """Segments of one file: byte ranges that end at line ends, or a whole gzip stream; `header`: starting at line 2.

    Raises:
        InputError: the file is empty or unreadable, a line is longer than `MAX_LINE_BYTES`, or a plain file has only a
            header.
    """
    try:
        size = file_version(file).num_bytes
        if size == 0:
            raise InputError(f"{file}: the file is empty, expected lines of text")
        if is_gzip(file):
            return (Segment(file=file, start=int(header), stop=0),)
        start = len(first_line(file)) if header else 0
        if start == size:
            raise InputError(f"{file}: {_ONLY_A_HEADER}")
        return tuple(_byte_ranges(file, start, size, block_bytes))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None


def _byte_ranges(file: str, start: int, size: int, block_bytes: int) -> Iterator[Segment]:
    with open_file(file) as stream:
        while start < size:
            stop = start + block_bytes
            if stop < size:
                stream.seek(stop - 1)
                while (chunk := stream.readline(_SCAN_BYTES)) and not chunk.endswith(b"\n"):
                    if stream.tell() - stop > MAX_LINE_BYTES:
                        raise _long_line(file, _count_lines(file, 0, stop, None))
                stop = stream.tell()
            stop = min(stop, size)
            yield Segment(file=file, start=start, stop=stop)
            start = stop


def text_blocks(segment: Segment, block_bytes: int) -> Iterator[Block]:
    """The blocks of a segment, in order."""
    if not segment.stop:
        return _gzip_blocks(segment.file, block_bytes, segment.start)
    return iter((Block(file=segment.file, start=segment.start, stop=segment.stop, num_rows=segment.num_rows),))


def _gzip_blocks(file: str, block_bytes: int, header_lines: int = 0) -> Iterator[Block]:
    try:
        with open_file(file) as stream:
            yield from _blocks_of(file, inflated(stream, block_bytes), block_bytes, header_lines)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None


def _blocks_of(file: str, pieces: Iterator[bytes], block_bytes: int, header_lines: int) -> Iterator[Block]:
    rest, line, ended, wanted = b"", 1, False, block_bytes
    while not ended:
        parts, held = [rest], len(rest)
        while held < wanted and not ended:
            try:
                piece = next(pieces, b"")
            except InputError as error:
                raise InputError(f"{file}:{line}: {error} (somewhere after this line)") from None
            parts.append(piece)
            held, ended = held + len(piece), not piece
        text = b"".join(parts)
        end = len(text) if ended else text.rfind(b"\n") + 1
        text, rest = text[:end], text[end:]
        if text and line <= header_lines:
            text, line = text.partition(b"\n")[2], line + 1
        if text:
            lines = text.count(b"\n") + (not text.endswith(b"\n"))
            yield Block(file=file, start=0, stop=0, num_rows=lines, line=line, payload=text)
            line, wanted = line + lines, block_bytes
        elif len(rest) > MAX_LINE_BYTES:
            raise _long_line(file, line)
        elif not ended:
            wanted += held  # the line is longer than a block
    if line == 1:
        raise InputError(f"{file}: the file is empty, expected lines of text")
    if line == 1 + header_lines:
        raise InputError(f"{file}: {_ONLY_A_HEADER}")


def _long_line(file: str, line: int) -> InputError:
    return InputError(f"{file}:{line}: expected a line of at most {MAX_LINE_BYTES} bytes, got a longer one")


def read_text(block: Block) -> bytes:
    """The lines of a block, without a byte order mark at the start of the file; adds a missing line end at its end."""
    if block.payload is not None:
        text, is_first = block.payload, block.line == 1
    else:
        is_first = block.start == 0
        try:
            with open_file(block.file) as stream:
                stream.seek(block.start)
                text = stream.read(block.stop - block.start)
        except OSError as error:
            raise InputError(f"cannot read {block.file}: {error.strerror or error}") from None
        if len(text) != block.stop - block.start:
            raise InputError(
                f"{block.file}: expected {block.stop} bytes, got {block.start + len(text)}: "
                f"the file shrank while it was read"
            )
    if is_first:
        text = text.removeprefix(codecs.BOM_UTF8)
    return text if text.endswith(b"\n") else text + b"\n"


def locate_line(block: Block, line: int) -> str:
    """``FILE:LINE`` of line number `line` (from 0) of a block. Scans the file up to the block; only for messages."""
    first_line = block.line or 1 + _count_lines(block.file, 0, block.start, None)
    return f"{block.file}:{first_line + line}"


def count_segment(segment: Segment, at_most: int | None) -> int:
    """Lines of a segment; can stop counting at `at_most`. Cached until the file changes."""
    if segment.num_rows is not None:
        return segment.num_rows
    return _count_cached(segment.file, segment.start, segment.stop, at_most, file_version(segment.file))


@lru_cache(maxsize=4096)
def _count_cached(file: str, start: int, stop: int, at_most: int | None, version: FileVersion) -> int:
    del version  # part of the cache key only
    if stop:
        return _count_lines(file, start, stop, at_most)
    lines = 0
    for block in _gzip_blocks(file, _SCAN_BYTES, start):
        lines += block.num_rows or 0
        if at_most is not None and lines >= at_most:
            break
    return lines


def _count_lines(file: str, start: int, stop: int, at_most: int | None) -> int:
    lines, last, left = 0, b"\n", stop - start
    with open_file(file) as stream:
        stream.seek(start)
        while left and (at_most is None or lines < at_most) and (chunk := stream.read(min(_SCAN_BYTES, left))):
            lines += chunk.count(b"\n")
            last, left = chunk[-1:], left - len(chunk)
    return lines + (last != b"\n")
