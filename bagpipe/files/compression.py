"""Kinds of compression, told from the first bytes of a file, and the content of gzip and zlib files.

first bytes ──compression_of──> "", gzip, zstd, …      stream ──inflated──> pieces of its content
                                                              ──open_inflated──> a stream of its content
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from bagpipe.errors import InputError

__all__ = ["START_BYTES", "compression_of", "inflated", "is_zlib", "open_inflated"]

#: Bytes that `compression_of` looks at.
START_BYTES = 12

_STARTS: Mapping[str, re.Pattern[bytes]] = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "lz4": re.compile(rb"\x04\x22\x4d\x18"),
    "zip": re.compile(rb"PK\x03\x04"),
    "compress": re.compile(rb"\x1f\x9d"),
}

_READ_BYTES = 1 << 20  # compressed; three to four times as much text

#: zlib's numbers for a header and checksum of the kind.
_WINDOW_BITS: Mapping[str, int] = {"gzip": 31, "zlib": 15}


def compression_of(start: bytes) -> str:
    """The name of the compression of a file that begins so; empty: none. None of them begins as text does.

    Args:
        start: the first `START_BYTES` of the file, or all.
    """
    return next((name for name, pattern in _STARTS.items() if pattern.match(start)), "")


def is_zlib(start: bytes) -> bool:
    """Whether a file that begins so can be a zlib stream. So can a text."""
    return len(start) > 1 and start[0] & 0x0F == 8 and start[0] >> 4 <= 7 and int.from_bytes(start[:2], "big") % 31 == 0


def inflated(stream: BinaryIO, step_bytes: int, kind: str = "gzip") -> Iterator[bytes]:
    """The content of a stream in pieces of 1 to `step_bytes` bytes.

    `gzip.GzipFile` inflates 8 KiB at a time, and between two steps another thread can hold the interpreter lock for its
    5 ms. Large steps keep this thread at zlib's speed however busy the other threads are.

    Args:
        stream: the compressed bytes, from where it stands.
        step_bytes: most bytes of a piece.
        kind: gzip or zlib.

    Raises:
        InputError: the stream is corrupt or cut short.
    """
    packed = stream.read(_READ_BYTES)
    while packed:
        member = zlib.decompressobj(wbits=_WINDOW_BITS[kind])
        while not member.eof:
            try:
                piece = member.decompress(packed, step_bytes)
            except zlib.error as error:
                raise InputError(f"expected {kind} data, got a corrupt stream ({error})") from None
            if piece:
                yield piece
            elif not packed and not member.eof:
                raise InputError(f"expected the end of the {kind} stream, got a file cut short")
            packed = member.unconsumed_tail or member.unused_data or stream.read(_READ_BYTES)
        # Another member can follow, or zeros that pad the file.
        while packed and not packed.lstrip(b"\0"):
            packed = stream.read(_READ_BYTES)
        packed = packed.lstrip(b"\0")


def open_inflated(stream: BinaryIO, kind: str, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A stream of the content of a gzip or zlib stream; reading raises InputError as `inflated` does."""
    return io.BufferedReader(_Pieces(inflated(stream, buffer_bytes, kind)), buffer_bytes)


class _Pieces(io.RawIOBase):
    """Pieces of bytes, one after the other, as a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # what io.BufferedReader gives
        """See `io.RawIOBase`."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
