"""`Link`: one end of a connection between two processes. Frames cross by shared memory, their sizes by a pipe.

    send     parts ──copy──> ring of shared memory ──copy──> frame     receive
             FRAME kind, size │ BYTES n │ BYTES n  ── pipe ──>
                                <── pipe ── FREE n │ FREE n

A frame that is larger than the free part of the ring crosses in pieces. An end takes what has come whenever it waits,
so two ends that send at the same time never wait for each other. The rings are files without a name, which the system
frees with the last process that holds them.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Frame", "Link", "LinkClosed"]

#: How often a waiting end checks whether the process at the other end lives. Usually the pipe's end tells it at once.
_CHECK_MS = 250
_FRAME, _BYTES, _FREE = 1, 2, 3
_MESSAGE = struct.Struct("<HHIq")  # message, kind of the frame, run, number of bytes
_READ_BYTES = 1 << 16


class LinkClosed(Exception):
    """The other end is gone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One message of an end.

    Attributes:
        kind, run: numbers that the sender chose, of 16 and 32 bits.
        data: its bytes.
    """

    kind: int
    run: int
    data: bytearray


class Link:
    """One end of a connection. For one thread.

    Args:
        read_fd, write_fd: pipes from and to the other end; closed with the link.
        in_fd, out_fd: shared files, the other end's `out_fd` and `in_fd`. They can be closed afterwards.
        is_alive: whether the other process lives.
    """

    def __init__(self, *, read_fd: int, write_fd: int, in_fd: int, out_fd: int, is_alive: Callable[[], bool]) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        os.set_blocking(write_fd, False)
        self._is_alive = is_alive
        self._in, self._out = _map(in_fd), _map(out_fd)
        self._read_at = self._write_at = 0
        self._num_free = self._out.shape[0]
        self._unannounced = 0  # bytes in the ring that the other end does not know of
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._frames: deque[Frame] = deque()
        self._incoming: Frame | None = None
        self._num_filled = 0

    def close(self) -> None:
        """Close the pipes: the other end's calls raise `LinkClosed`. Idempotent."""
        for fd in {self._read_fd, self._write_fd} - {-1}:
            os.close(fd)
        self._read_fd = self._write_fd = -1

    def send(self, kind: int, run: int, parts: Sequence[Any] = ()) -> None:
        """Send a frame. Waits until all of it is in the ring.

        Args:
            kind, run: see `Frame`.
            parts: contiguous buffers, sent as one.

        Raises:
            LinkClosed: the other end is gone.
        """
        arrays = [np.frombuffer(part, np.uint8) for part in parts if len(part)]
        self._post(_FRAME, sum(array.shape[0] for array in arrays), kind, run)
        for array in arrays:
            self._put(array)
        self._announce()
        self._flush()

    def receive(self) -> Frame:
        """The next frame; waits for it.

        Raises:
            LinkClosed: the other end is gone, and all that it sent has been received.
        """
        while not self._frames:
            self._wait()
        return self._frames.popleft()

    def _put(self, array: NDArray[np.uint8]) -> None:
        size = self._out.shape[0]
        start = 0
        while start < array.shape[0]:
            if not self._num_free:
                self._announce()
                self._wait()
                continue
            count = min(array.shape[0] - start, self._num_free, size - self._write_at)
            self._out[self._write_at : self._write_at + count] = array[start : start + count]
            start += count
            self._write_at = (self._write_at + count) % size
            self._num_free -= count
            self._unannounced += count
            if self._unannounced >= size // 4:  # the other end can take it meanwhile
                self._announce()

    def _announce(self) -> None:
        if self._unannounced:
            self._post(_BYTES, self._unannounced)
            self._unannounced = 0

    def _post(self, message: int, num_bytes: int, kind: int = 0, run: int = 0) -> None:
        self._outbox += _MESSAGE.pack(message, kind, run, num_bytes)

    def _flush(self) -> None:
        """Write messages; keep what the pipe has no room for."""
        while self._outbox:
            try:
                del self._outbox[: os.write(self._write_fd, self._outbox)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outbox.clear()  # reading tells the end, after all that has come

    def _wait(self) -> None:
        """Wait until something comes, and take it.

        Raises:
            LinkClosed: nothing can come any more.
        """
        self._flush()
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        if self._outbox:
            poll.register(self._write_fd, select.POLLOUT)
        events = dict(poll.poll(_CHECK_MS))
        if self._read_fd in events:
            data = os.read(self._read_fd, _READ_BYTES)
            if not data:
                raise LinkClosed
            self._inbox += data
            self._take()
        elif not events and not self._is_alive():
            raise LinkClosed
        self._flush()

    def _take(self) -> None:
        """Act on the messages that have come."""
        whole = len(self._inbox) // _MESSAGE.size * _MESSAGE.size
        messages = bytes(self._inbox[:whole])
        del self._inbox[:whole]
        for message, kind, run, num_bytes in _MESSAGE.iter_unpack(messages):
            if message == _FREE:
                self._num_free += num_bytes
            elif message == _BYTES:
                self._copy_out(num_bytes)
            else:
                self._incoming = Frame(kind=kind, run=run, data=bytearray(num_bytes))
                self._num_filled = 0
            if self._incoming is not None and self._num_filled == len(self._incoming.data):
                self._frames.append(self._incoming)
                self._incoming = None

    def _copy_out(self, num_bytes: int) -> None:
        assert self._incoming is not None, "bytes follow the size of their frame"
        data = np.frombuffer(self._incoming.data, np.uint8)
        left, size = num_bytes, self._in.shape[0]
        while left:
            count = min(left, size - self._read_at)
            data[self._num_filled : self._num_filled + count] = self._in[self._read_at : self._read_at + count]
            self._read_at = (self._read_at + count) % size
            self._num_filled += count
            left -= count
        self._post(_FREE, num_bytes)


def _map(fd: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
