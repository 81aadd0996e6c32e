"""Large messages from a cacher to a trainer on the same host, through a file in memory instead of a socket.

    cacher   RingWriter.put ──pwritev─> file: nonce │ number of bytes taken │ ring ──pread──> RingReader.take   trainer
             `Shared(start, num_bytes)` ───────────────────── stream ─────────────────────>

The file has no name. The trainer opens it as a descriptor of the cacher's process. It uses a file with these seals and
this nonce only: the number can be another process in a container with processes of its own, and a lying cacher could
name any file. Both ends use system calls, not mappings, so neither can crash the other by changing the file, whose size
is sealed. A message that does not fit, or for which there is no memory, goes through the stream, as do small ones.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from bagpipe.client.agreement import MAX_CACHER_MESSAGE_BYTES

__all__ = ["MIN_SHARED_BYTES", "RING_BYTES", "RingReader", "RingWriter", "SharedFile"]

#: Bytes of a cacher's ring for a rank. Only those that messages have used take memory.
RING_BYTES = 32 << 20
#: Smaller messages go through the stream: they cost as much there.
MIN_SHARED_BYTES = 64 << 10

_NONCE_BYTES = 16
_TAKEN_AT = _NONCE_BYTES
_COUNT_BYTES = 8
_MAX_COUNT = 1 << 62
#: Parts that one call writes, at most (IOV_MAX of Linux).
_MAX_PARTS = 1024
#: Where the ring begins.
_RING_AT = 64
#: Of the file, so that its size stays. Only files in memory have seals, and others in memory have other ones.
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("SHRINK", "GROW", "SEAL"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """How another process of the host finds the file of a `RingWriter`.

    Attributes:
        pid, fd: of the writer's process.
        num_bytes: of the ring.
        nonce: the file begins with it.
    """

    pid: int
    fd: int
    num_bytes: int
    nonce: bytes


class _OpenFile:
    """A file that is open inside a ``with`` block.

    Attributes:
        is_supported: the system has files in memory.
    """

    is_supported = hasattr(os, "memfd_create")
    _fd = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._fd = -1


class RingWriter(_OpenFile):
    """The cacher's end. For one thread; usable inside a ``with`` block.

    Args:
        num_bytes: of the ring.
    """

    def __init__(self, num_bytes: int = RING_BYTES) -> None:
        self._num_bytes = num_bytes
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._put = 0
        self._free_to = 0  # bytes before are taken, or were left out

    def __enter__(self) -> Self:
        """Make the file.

        Raises:
            OSError: there are no descriptors left, or no memory.
        """
        self._fd = os.memfd_create("bagpipe-messages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _RING_AT + self._num_bytes)
            os.pwrite(self._fd, self._nonce, 0)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def file(self) -> SharedFile:
        """For the reader."""
        return SharedFile(pid=os.getpid(), fd=self._fd, num_bytes=self._num_bytes, nonce=self._nonce)

    def put(self, *parts: bytes | memoryview) -> int | None:
        """Write a message. Returns where it starts, counted in bytes put before; None if there is no room or memory.

        Args:
            parts: of the message, bytes that follow each other.

        Raises:
            ValueError: the reader says that it has taken more than was put.
        """
        taken = int.from_bytes(os.pread(self._fd, _COUNT_BYTES, _TAKEN_AT), "little")
        if taken > self._put:
            raise ValueError(f"{taken} bytes taken from shared memory, where {self._put} were put")
        taken = max(taken, self._free_to)
        start, num_bytes, is_empty = self._put, sum(map(len, parts)), taken == self._put
        if is_empty or start % self._num_bytes + num_bytes > self._num_bytes:
            start += -start % self._num_bytes  # at the ring's beginning: in one piece, and in the processor's cache
        free_to = start if is_empty else taken
        if start + num_bytes - free_to > self._num_bytes:
            return None
        num_written = 0
        try:
            for first in range(0, len(parts), _MAX_PARTS):
                some = parts[first : first + _MAX_PARTS]
                num_written += os.pwritev(self._fd, some, _RING_AT + start % self._num_bytes + num_written)
        except OSError:  # no memory: not even for the first page
            return None
        if num_written < num_bytes:
            return None
        self._put, self._free_to = start + num_bytes, free_to
        return start


class RingReader(_OpenFile):
    """The trainer's end. For one thread; usable inside a ``with`` block.

    Args:
        file: of the writer.
    """

    def __init__(self, file: SharedFile) -> None:
        self._file = file

    def __enter__(self) -> Self:
        """Open the file.

        Raises:
            OSError: it is out of reach, or has no seals, or the system has no such files.
            ValueError: it is another file, has another size, or is too large.
        """
        if not self.is_supported:
            raise OSError("this system has no files in memory")
        if not 0 < self._file.num_bytes <= MAX_CACHER_MESSAGE_BYTES:
            raise ValueError(f"expected at most {MAX_CACHER_MESSAGE_BYTES} bytes, got {self._file.num_bytes}")
        self._fd = _open_plain(f"/proc/{self._file.pid}/fd/{self._file.fd}")
        try:
            if fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) != _SEALS:
                raise ValueError("expected the cacher's file of messages, got one with other seals")
            if os.fstat(self._fd).st_size != _RING_AT + self._file.num_bytes:
                raise ValueError("expected the cacher's file of messages, got one of another size")
            if os.pread(self._fd, _NONCE_BYTES, 0) != self._file.nonce:
                raise ValueError("expected the cacher's file of messages, got another one")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def take(self, start: int, num_bytes: int) -> bytes:
        """Copy a message, and free its place.

        Raises:
            ValueError: it cannot be there.
        """
        offset = start % self._file.num_bytes
        if start > _MAX_COUNT or num_bytes > self._file.num_bytes - offset:
            raise ValueError(f"{num_bytes} bytes from {offset} on, in shared memory of {self._file.num_bytes}")
        message = os.pread(self._fd, num_bytes, _RING_AT + offset)
        os.pwrite(self._fd, (start + num_bytes).to_bytes(_COUNT_BYTES, "little"), _TAKEN_AT)
        return message


def _open_plain(path: str) -> int:
    """Open a file for reading and writing, unless it is a device, a pipe or a socket: opening one can have effects.

    Raises:
        OSError: it is out of reach.
        ValueError: it is no file.
    """
    looked_at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(looked_at).st_mode):
            raise ValueError("expected the cacher's file of messages, got no file")
        return os.open(f"/proc/self/fd/{looked_at}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(looked_at)
