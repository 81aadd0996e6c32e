"""`free_memory_bytes`: memory that this process can still take, of the host or of its control groups (cgroups)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory_bytes"]

#: Usage and limit of a group, in version 2 and 1 of cgroups, and what of the usage can be reclaimed.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be taken without swapping: the least of the host and of every group that this process is in.

    Args:
        proc, groups: where Linux mounts them.

    Returns:
        None: unknown, because the system is not Linux.
    """
    found = _numbers(proc / "meminfo").get("MemAvailable")
    if found is None:
        return None
    free = found * 1024
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = groups / "memory" if controllers else groups
        own = folder / path.strip("/")
        for group in (own, *own.parents):
            if group == folder.parent:
                break
            free = min(free, _free_in(group, free))
    return max(0, free)


def _free_in(group: Path, otherwise: int) -> int:
    """Bytes free in a group; `otherwise` if it has no limit."""
    for limit, usage, reclaimable in _FILES:
        most, used = _text(group / limit).strip(), _text(group / usage).strip()
        if most.isdigit() and used.isdigit():
            return int(most) - int(used) + _numbers(group / "memory.stat").get(reclaimable, 0)
    return otherwise


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of lines ``name number`` or ``name: number kB``."""
    words = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
