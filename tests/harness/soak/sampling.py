"""Current resource use of a process, a store and a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import redis

__all__ = ["folder_bytes", "process_values", "store_values"]


def process_values(pid: int) -> dict[str, float]:
    """Resident bytes, open descriptors and threads of a process. ProcessLookupError if it has ended."""
    folder = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        fds = len(os.listdir(folder / "fd"))
        return {
            "rss_bytes": float(status["VmRSS"].split()[0]) * 1024,
            "fds": float(fds),
            "threads": float(status["Threads"]),
        }
    except (FileNotFoundError, KeyError):  # gone; a zombie has no VmRSS
        raise ProcessLookupError(f"process {pid} has ended") from None


def store_values(client: redis.Redis) -> dict[str, float]:
    """Bytes of a server's data, by its own count."""
    memory: Any = client.info("memory")
    return {"used_bytes": float(memory["used_memory_dataset"])}


def folder_bytes(folder: Path) -> float:
    """Bytes of all files below a folder; hard links count once."""
    sizes = {}
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        if path.is_file():
            sizes[found.st_ino] = found.st_size
    return float(sum(sizes.values()))
