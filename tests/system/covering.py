"""Covering arrays: few combinations of settings that contain every t values of every t axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

__all__ = ["covering"]


def covering(axes: Mapping[str, Sequence[object]], *, strength: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows that contain all value combinations of any `strength` axes. Greedy; deterministic for a seed."""
    rng = random.Random(seed)
    names = sorted(axes)
    missing = {
        combination
        for group in itertools.combinations(names, strength)
        for combination in itertools.product(*[[(name, value) for value in axes[name]] for name in group])
    }
    order = sorted(missing, key=repr)
    rows: list[dict[str, object]] = []
    while missing:
        best: dict[str, object] = {}
        best_new: set[tuple[tuple[str, object], ...]] = set()
        start = next(combination for combination in order if combination in missing)
        for _ in range(30):
            row = {name: rng.choice(axes[name]) for name in names} | dict(start)
            new = {tuple((name, row[name]) for name in group) for group in itertools.combinations(names, strength)}
            new &= missing
            if len(new) > len(best_new):
                best, best_new = row, new
        rows.append(best)
        missing -= best_new
    return rows
