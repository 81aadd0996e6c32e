"""`FileVersion`: the identity of a file's content, local or remote."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FileVersion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """Identity of a file's content. The inode and size tell apart files written within one clock tick.

    Attributes:
        inode, modified_ns, changed_ns: of a local file, else 0.
        num_bytes: size.
        tag: of a remote object: its ETag, or what the file system has in place of it.
    """

    inode: int = 0
    num_bytes: int
    modified_ns: int = 0
    changed_ns: int = 0
    tag: str = ""

    def __str__(self) -> str:
        told = f"etag {self.tag}" if self.tag else f"modified at {self.modified_ns} ns"
        return f"{self.num_bytes} bytes, {told}"
