"""`RemoteFile`: a stream over an object behind a URL, with read-ahead.

    read, readline, seek ──> ranges of `RemoteObject`

A fetch that goes on where the last one ended is twice as long, up to AHEAD_BYTES, and the next one is on its way
meanwhile.
"""

from __future__ import annotations

import io
import os
import threading
from typing import Any

from bagpipe.files.remote import RemoteObject

__all__ = ["RemoteFile"]

#: Bytes of the first fetch of a stream, and of the longest.
FIRST_BYTES = 64 << 10
AHEAD_BYTES = 8 << 20


class RemoteFile(io.RawIOBase):
    """A stream over an object, with read-ahead where reads follow one another. One thread's.

    Args:
        source: the object.
    """

    def __init__(self, source: RemoteObject) -> None:
        super().__init__()
        self._source = source
        self._size = source.version.num_bytes
        self._place = 0
        self._held, self._held_at = b"", 0
        self._step = FIRST_BYTES
        self._ahead: _Fetch | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Exactly `size` bytes, less only at the end; -1: the rest."""
        stop = self._size if size is None or size < 0 else min(self._size, self._place + size)
        parts: list[bytes] = []
        while self._place < stop:
            part = self._some(stop)
            parts.append(part)
            self._place += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)

    def readline(self, size: int | None = -1) -> bytes:
        """The bytes up to a line end, at most `size`."""
        most = self._size if size is None or size < 0 else min(self._size, self._place + size)
        parts: list[bytes] = []
        while self._place < most:
            part = self._some(most)
            end = part.find(b"\n") + 1
            part = part[:end] if end else part
            parts.append(part)
            self._place += len(part)
            if end:
                break
        return b"".join(parts)

    def _some(self, stop: int) -> bytes:
        """Bytes from the place on, at least one, none behind `stop`."""
        offset = self._place - self._held_at
        if not 0 <= offset < len(self._held):
            self._fetch(stop)
            offset = 0
        return self._held[offset : offset + stop - self._place]

    def _fetch(self, stop: int) -> None:
        goes_on = bool(self._held) and self._place == self._held_at + len(self._held)
        self._step = min(2 * self._step, AHEAD_BYTES) if goes_on else FIRST_BYTES
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.start == self._place:
            self._held = ahead.result()
        else:
            self._held = self._source.read_range(self._place, max(stop, self._place + self._step))
        self._held_at = self._place
        end = self._held_at + len(self._held)
        if goes_on and end < self._size:
            self._ahead = _Fetch(self._source, end, end + min(2 * self._step, AHEAD_BYTES))


class _Fetch:
    """A range on its way."""

    def __init__(self, source: RemoteObject, start: int, stop: int) -> None:
        self.start = start
        self._found: bytes | BaseException = b""
        self._thread = threading.Thread(target=self._run, args=(source, stop), name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self, source: RemoteObject, stop: int) -> None:
        try:
            self._found = source.read_range(self.start, stop)
        except BaseException as error:
            self._found = error

    def result(self) -> bytes:
        self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found
