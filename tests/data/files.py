"""Small Criteo-format texts of our own, and the real sample where one has been put."""

from __future__ import annotations

import os
import random
from pathlib import Path

__all__ = ["criteo_line", "criteo_lines", "real_samples"]


def real_samples() -> list[Path]:
    """The file $BAGPIPE_CRITEO_SAMPLE names, or criteo_sample.tsv.gz under $BAGPIPE_DATA, if it is there."""
    named = os.environ.get("BAGPIPE_CRITEO_SAMPLE")
    path = Path(named) if named else Path(os.environ.get("BAGPIPE_DATA", "datasets")) / "criteo_sample.tsv.gz"
    return [path] if path.is_file() else []


def criteo_line(label: str = "0", dense: str = "1", sparse: str = "a") -> bytes:
    """One line, the same value in every column of a kind."""
    return "\t".join([label, *[dense] * 13, *[sparse] * 26]).encode()


def criteo_lines(rows: int, seed: int = 0) -> bytes:
    """Lines with everything that is allowed: missing values, negative integers, ids of 1 to 16 digits, both cases."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        dense = [rng.choice(["", "0", "-1", "-22", str(rng.randrange(10**9)), "0007"]) for _ in range(13)]
        ids = []
        for _ in range(26):
            text = f"{rng.getrandbits(64):016x}"[: rng.randint(1, 16)]
            ids.append(rng.choice(["", text, text.upper(), text]))
        lines.append("\t".join([rng.choice("01"), *dense, *ids]))
    return "".join(line + "\n" for line in lines).encode()
