"""The part of the FUSE kernel protocol that `tests.faults.power` uses. Needs no libfuse.

Layouts and numbers are those of linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

__all__ = ["OPCODES", "UNANSWERED", "Request", "Unknown", "attributes", "mount", "receive", "reply", "unmount"]

OPCODES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 8: "mknod", 9: "mkdir", 10: "unlink", 11: "rmdir",
    12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync",
    25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 34: "access",
    35: "create", 42: "batch_forget", 45: "rename2",
}  # fmt: skip
UNANSWERED = ("forget", "batch_forget", "interrupt")

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_MAX_WRITE_BYTES = 1 << 17
_FORCE, _DETACH = 1, 2  # MNT_FORCE: pending requests fail


class Unknown(OSError):
    """A request that this file system does not support."""


class Request:
    """A request: its name, its inode, and the bytes after the header."""

    def __init__(self, data: bytes) -> None:
        _, opcode, self.unique, self.node, *_ = _IN.unpack_from(data)
        self.name = OPCODES.get(opcode, "interrupt" if opcode == 36 else str(opcode))
        self.body = data[_IN.size :]

    def fields(self, layout: str) -> tuple[int, ...]:
        """Leading numbers of the body."""
        return struct.unpack_from(layout, self.body)

    def names(self, layout: str = "<") -> list[str]:
        """Strings after the numbers."""
        return [os.fsdecode(name) for name in self.body[struct.calcsize(layout) :].split(b"\0")[:-1]]


def mount(folder: Path) -> int:
    """Mount a file system. Returns the file descriptor that delivers its requests."""
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    try:
        _call("mount", b"bagpipe-test", os.fsencode(folder), b"fuse", 0, options.encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def unmount(folder: Path) -> None:
    """Unmount, even while the file system is in use."""
    _call("umount2", os.fsencode(folder), _FORCE | _DETACH)


def receive(descriptor: int) -> Request | None:
    """The next request; None: unmounted."""
    while True:
        try:
            return Request(os.read(descriptor, _MAX_WRITE_BYTES + (1 << 16)))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            if error.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # ENOENT: cancelled before it was read
                raise


def reply(descriptor: int, request: Request, answer: Callable[[Request], bytes]) -> None:
    """Answer a request with the result of `answer`, or with the error it raises."""
    try:
        body, code = _greet() if request.name == "init" else answer(request), 0
    except OSError as error:
        body, code = b"", -(error.errno or errno.EIO)
    if request.name in UNANSWERED:
        return
    try:
        os.write(descriptor, _OUT.pack(_OUT.size + len(body), code, request.unique) + body)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # the requester is gone
            raise


def attributes(*, node: int, size: int, mode: int, num_links: int, seconds: int) -> bytes:
    """A `struct fuse_attr`."""
    blocks = (size + 511) // 512
    return _ATTRIBUTES.pack(
        node, size, blocks, seconds, seconds, seconds, 0, 0, 0, mode, num_links, os.geteuid(), os.getegid(), 0, 4096, 0
    )


def _greet() -> bytes:
    big_writes = 1 << 5
    return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, big_writes, 16, 12, _MAX_WRITE_BYTES, 1, 0, 0, *[0] * 8)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
