"""Damage to the newest checkpoint: a flipped bit, a cut, emptied or removed file, or two swapped files.

Only files of this checkpoint are damaged: files hard-linked from older checkpoints would damage those, too.
"""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["checkpoints_at", "damage_newest"]


def checkpoints_at(folder: Path) -> list[Path]:
    """Folders of the checkpoints with a manifest, oldest first: by generation, then by step."""
    return sorted(manifest.parent for manifest in folder.glob("generation-*/step-*/manifest.json"))


def damage_newest(folder: Path, choice: float, damaged: set[Path]) -> str:
    """Damage the newest checkpoint unless it is the last whole one: a job without a whole checkpoint must refuse to
    start.

    Args:
        folder: of all checkpoints.
        choice: in [0, 1), selects the damage.
        damaged: checkpoints that are damaged already; this one is added.

    Returns:
        Description of the damage; empty if there is nothing to damage.
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
