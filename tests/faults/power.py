"""A folder on a disk whose power can fail: unsynced changes are lost.

    process under test ──write, rename, fsync──> kernel ──/dev/fuse──> PowerDisk's process: current and durable state
    fail_after  after so many more changes, every further one fails: the power is about to fail
    fail()      all changes that are not durable are lost; the folder answers no request
    restore()   the folder is back with the durable state

File contents are durable after fsync of the file; a directory entry (created, linked, renamed, removed) after fsync of
its folder. This is the minimum that POSIX promises; most file systems do more. With `names_are_safe` directory entries
are durable immediately. Needs root and /dev/fuse.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from tests.faults import fuse

__all__ = ["PowerDisk", "why_no_power_disk"]

_CONTEXT = multiprocessing.get_context("forkserver")
_DEADLINE_S = 30.0
_ROOT = 1
_SIZE_CHANGES, _MODE_CHANGES = 8, 1
_CHANGES = frozenset(
    {"setattr", "mkdir", "create", "link", "unlink", "rmdir", "rename", "rename2", "write", "fsync", "fsyncdir"}
)


def why_no_power_disk(folder: Path = Path("/tmp")) -> str:
    """Why this machine cannot create a power disk; empty if it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    point = folder / f"bagpipe-power-{os.getpid()}"
    point.mkdir()
    try:
        os.close(fuse.mount(point))
        fuse.unmount(point)
    except OSError as error:
        return f"mount: {error}"
    finally:
        point.rmdir()
    return ""


class PowerDisk:
    """The disk. Context manager: mounted at a folder while entered.

    Args:
        folder: an empty folder.
        names_are_safe: see the module.
    """

    def __init__(self, folder: Path, *, names_are_safe: bool = False) -> None:
        self.folder = folder
        self._names_are_safe = names_are_safe

    def __enter__(self) -> Self:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, str(self.folder), self._names_are_safe))
        self._process.start()
        theirs.close()
        self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_DEADLINE_S)
        assert self._process.exitcode is not None, "the disk's process did not end"

    def fail_after(self, num_changes: int) -> None:
        """Allow so many more changes, syncs included, and refuse all others until `restore`."""
        self._say("fail-after", num_changes)

    def fail(self) -> None:
        """Power off."""
        self._say("fail")

    def restore(self) -> None:
        """Power on."""
        self._say("restore")

    def _say(self, word: str, number: int = 0) -> None:
        self._pipe.send((word, number))
        self._hear()

    def _hear(self) -> None:
        assert self._pipe.poll(_DEADLINE_S), "the disk does not answer"
        assert self._pipe.recv() == "done"


@dataclass(slots=True, eq=False)
class _Node:
    """A file or a folder. `safe_…`: its durable state."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, _Node] = field(default_factory=dict)
    safe_data: bytearray = field(default_factory=bytearray)
    safe_entries: dict[str, _Node] = field(default_factory=dict)
    first_unsafe: int = 0

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def put(self, offset: int, data: bytes) -> None:
        if offset > len(self.data):
            self.resize(offset)
        self.data[offset : offset + len(data)] = data
        self.first_unsafe = min(self.first_unsafe, offset)

    def resize(self, size: int) -> None:
        self.first_unsafe = min(self.first_unsafe, size, len(self.data))
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def sync(self) -> None:
        if self.is_folder:
            self.safe_entries = dict(self.entries)
        else:
            self.safe_data[self.first_unsafe :] = self.data[self.first_unsafe :]
            self.first_unsafe = len(self.data)

    def forget(self) -> None:
        """Reset this node and all below it to the durable state."""
        self.data, self.first_unsafe = bytearray(self.safe_data), len(self.safe_data)
        self.entries = dict(self.safe_entries)
        for node in self.entries.values():
            node.forget()


class _Disk:
    """Handlers of requests, by request name."""

    def __init__(self, *, names_are_safe: bool) -> None:
        self._names_are_safe = names_are_safe
        self._nodes: dict[int, _Node] = {}
        self.changes_left: int | None = None
        self.root = self._new(stat.S_IFDIR | 0o755)

    def answer(self, request: fuse.Request) -> bytes:
        handler: Callable[[fuse.Request], bytes] | None = getattr(self, f"_do_{request.name}", None)
        if handler is None:
            raise fuse.Unknown(errno.ENOSYS, request.name)
        if self.changes_left is not None and request.name in _CHANGES:
            if not self.changes_left:
                raise OSError(errno.EIO, "the power is going")
            self.changes_left -= 1
        return handler(request)

    def _new(self, mode: int) -> _Node:
        node = self._nodes[len(self._nodes) + _ROOT] = _Node(len(self._nodes) + _ROOT, mode)
        return node

    def _attributes(self, node: _Node) -> bytes:
        return fuse.attributes(
            node=node.number, size=len(node.data), mode=node.mode, num_links=1 + node.is_folder, seconds=1_000_000_000
        )

    def _entry(self, node: _Node) -> bytes:
        return struct.pack("<4Q2I", node.number, 0, 0, 0, 0, 0) + self._attributes(node)

    def _find(self, request: fuse.Request, name: str) -> _Node:
        found = self._nodes[request.node].entries.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, name)
        return found

    def _put(self, folder: int, name: str, node: _Node | None) -> None:
        at = self._nodes[folder]
        if node is None:
            at.entries.pop(name, None)
        else:
            at.entries[name] = node
        if self._names_are_safe:
            at.sync()

    def _do_lookup(self, request: fuse.Request) -> bytes:
        return self._entry(self._find(request, request.names()[0]))

    def _do_forget(self, request: fuse.Request) -> bytes:
        return b""

    _do_batch_forget = _do_release = _do_releasedir = _do_flush = _do_access = _do_forget

    def _do_getattr(self, request: fuse.Request) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(self._nodes[request.node])

    def _do_setattr(self, request: fuse.Request) -> bytes:
        valid, _, _, size, *_, mode = request.fields("<2I6Q4I")
        node = self._nodes[request.node]
        if valid & _SIZE_CHANGES:
            node.resize(size)
        if valid & _MODE_CHANGES:
            node.mode = mode
        return self._do_getattr(request)

    def _do_mkdir(self, request: fuse.Request) -> bytes:
        (mode, _), [name] = request.fields("<2I"), request.names("<2I")
        node = self._new(stat.S_IFDIR | mode & 0o777)
        self._put(request.node, name, node)
        return self._entry(node)

    def _do_create(self, request: fuse.Request) -> bytes:
        (_, mode, *_), [name] = request.fields("<4I"), request.names("<4I")
        node = self._new(stat.S_IFREG | mode & 0o777)
        self._put(request.node, name, node)
        return self._entry(node) + self._do_open(request)

    def _do_link(self, request: fuse.Request) -> bytes:
        (number,), [name] = request.fields("<Q"), request.names("<Q")
        node = self._nodes[number]
        self._put(request.node, name, node)
        return self._entry(node)

    def _do_unlink(self, request: fuse.Request) -> bytes:
        [name] = request.names()
        self._find(request, name)
        self._put(request.node, name, None)
        return b""

    def _do_rmdir(self, request: fuse.Request) -> bytes:
        if self._find(request, request.names()[0]).entries:
            raise OSError(errno.ENOTEMPTY, "not empty")
        return self._do_unlink(request)

    def _do_rename(self, request: fuse.Request, layout: str = "<Q") -> bytes:
        (folder, *_), [old, new] = request.fields(layout), request.names(layout)
        node = self._find(request, old)
        there = self._nodes[folder].entries.get(new)
        if there is not None and there.entries:
            raise OSError(errno.ENOTEMPTY, "not empty")
        self._put(folder, new, node)
        if (folder, new) != (request.node, old):
            self._put(request.node, old, None)
        return b""

    def _do_rename2(self, request: fuse.Request) -> bytes:
        _, flags, _ = request.fields("<Q2I")
        if flags:  # RENAME_NOREPLACE, RENAME_EXCHANGE
            raise OSError(errno.EINVAL, "plain renames only")
        return self._do_rename(request, "<Q2I")

    def _do_open(self, request: fuse.Request) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0)

    _do_opendir = _do_open

    def _do_read(self, request: fuse.Request) -> bytes:
        _, offset, size = request.fields("<2QI")
        return bytes(self._nodes[request.node].data[offset : offset + size])

    def _do_write(self, request: fuse.Request) -> bytes:
        _, offset, size = request.fields("<2QI")
        self._nodes[request.node].put(offset, request.body[40 : 40 + size])
        return struct.pack("<2I", size, 0)

    def _do_fsync(self, request: fuse.Request) -> bytes:
        self._nodes[request.node].sync()
        return b""

    _do_fsyncdir = _do_fsync

    def _do_readdir(self, request: fuse.Request) -> bytes:
        _, offset, size = request.fields("<2QI")
        found = b""
        for number, (name, node) in enumerate(self._nodes[request.node].entries.items(), start=1):
            raw = os.fsencode(name)
            entry = struct.pack("<2Q2I", node.number, number, len(raw), stat.S_IFMT(node.mode) >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if number > offset:
                if len(found) + len(entry) > size:
                    break
                found += entry
        return found

    def _do_statfs(self, request: fuse.Request) -> bytes:
        free = 1 << 20
        return struct.pack("<5Q10I", free, free, free, free, free, 4096, 255, 4096, *[0] * 7)


def _serve(pipe: Connection, folder: str, names_are_safe: bool) -> None:
    """Main of the disk's process. When the other side closes the pipe, it unmounts the folder and ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    disk, point = _Disk(names_are_safe=names_are_safe), Path(folder)
    off = _power_on(disk, point)
    pipe.send("done")
    try:
        while True:
            word, number = pipe.recv()
            if word == "fail-after":
                disk.changes_left = number
            elif word == "fail":
                off()
                disk.root.forget()
            else:
                disk.changes_left = None
                off = _power_on(disk, point)
            pipe.send("done")
    except EOFError:
        off()


def _power_on(disk: _Disk, point: Path) -> Callable[[], None]:
    """Mount and serve in a thread. Returns a function that stops it."""
    descriptor = fuse.mount(point)
    is_off = False

    def run() -> None:
        while (request := fuse.receive(descriptor)) is not None:
            fuse.reply(descriptor, request, disk.answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def off() -> None:
        nonlocal is_off
        if is_off:
            return
        is_off = True
        fuse.unmount(point)
        thread.join(_DEADLINE_S)
        os.close(descriptor)

    return off
