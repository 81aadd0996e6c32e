"""Damage to the newest checkpoint: a bit flipped, a file cut, emptied or removed, or two files swapped.

Only files of its own are hit: one that older checkpoints share, as a hard link, would take them down with it.
"""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["checkpoints_at", "damage_newest"]


def checkpoints_at(folder: Path) -> list[Path]:
    """Folders of the checkpoints that have a manifest, oldest first: by generation, then by step."""
    return sorted(manifest.parent for manifest in folder.glob("generation-*/step-*/manifest.json"))


def damage_newest(folder: Path, choice: float, damaged: set[Path]) -> str:
    """Damage it, unless it is the last one that is whole: a job without any whole checkpoint must refuse to go on.

    Args:
        folder: of all checkpoints.
        choice: in [0, 1), decides what happens.
        damaged: checkpoints that are damaged already; it is added.

    Returns:
        What was done, in words; empty if there is nothing to damage.
    """
    whole = [path for path in checkpoints_at(folder) if path not in damaged]
    if len(whole) < 2:
        return ""
    newest = whole[-1]
    damaged.add(newest)
    draw = random.Random(f"damage {choice}")
    files = sorted(path for path in newest.iterdir() if path.stat().st_nlink == 1)
    file = draw.choice(files)
    data = bytearray(file.read_bytes())
    how = draw.choice(("flip", "flip", "cut", "empty", "remove", "swap"))
    name = f"{newest.name}/{file.name}"
    if how == "remove":
        file.unlink()
        return f"{name} removed"
    if how == "swap" and len(files) > 1:
        other = draw.choice([path for path in files if path != file])
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{name} and {other.name} swapped"
    if how == "empty" or not data:
        file.write_bytes(b"")
        return f"{name} emptied"
    at = draw.randrange(len(data))
    if how == "cut":
        file.write_bytes(data[:at])
        return f"{name} cut at {at}"
    data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return f"{name} flipped at {at}"
