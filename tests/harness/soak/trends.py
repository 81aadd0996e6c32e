"""`Trend`: growth of a quantity over time. Pure.

The slope is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968), which ignores single peaks
such as a snapshot in memory. A trend is judged by the growth over the time observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ALLOWED", "Allowance", "Sample", "Trend", "trends_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resource use of one process or folder at one time.

    Attributes:
        at_s: since the job began.
        owner: trainer-0, daemon, store, checkpoints.
        values: by quantity: rss_bytes, fds, threads, used_bytes.
    """

    at_s: float
    owner: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Growth over the time observed that counts as noise: the larger of the two."""

    share: float
    amount: float


#: Allocators settle slowly; descriptors and threads are exact counts.
ALLOWED: Mapping[str, Allowance] = {
    "rss_bytes": Allowance(share=0.03, amount=4 << 20),
    "used_bytes": Allowance(share=0.03, amount=1 << 20),
    "fds": Allowance(share=0.0, amount=1.0),
    "threads": Allowance(share=0.0, amount=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One quantity of one owner.

    Attributes:
        owner, quantity: identify the trend.
        first, last, most: of the samples after the warm-up.
        growth: median slope times the time observed.
        is_flat: the growth is within the allowance.
    """

    owner: str
    quantity: str
    first: float
    last: float
    most: float
    growth: float
    is_flat: bool


def trends_of(samples: Sequence[Sample], warm_up_s: float) -> tuple[Trend, ...]:
    """Trends of all quantities, by owner and quantity, in the order of their first samples.

    Raises:
        ValueError: fewer than two samples of something after the warm-up.
    """
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in samples:
        for quantity, value in sample.values.items():
            found = series.setdefault((sample.owner, quantity), [])
            if sample.at_s >= warm_up_s:
                found.append((sample.at_s, value))
    return tuple(_trend(owner, quantity, points) for (owner, quantity), points in series.items())


def _trend(owner: str, quantity: str, points: Sequence[tuple[float, float]]) -> Trend:
    if len(points) < 2:
        raise ValueError(f"{quantity} of {owner}: expected at least 2 samples after the warm-up, got {len(points)}")
    at_s, values = np.array(points).T
    earlier, later = np.triu_indices(len(points), 1)
    slope = float(np.median((values[later] - values[earlier]) / (at_s[later] - at_s[earlier])))
    growth = slope * float(at_s[-1] - at_s[0])
    allowance = ALLOWED[quantity]
    return Trend(
        owner=owner,
        quantity=quantity,
        first=float(values[0]),
        last=float(values[-1]),
        most=float(values.max()),
        growth=growth,
        is_flat=growth <= max(allowance.share * float(values[0]), allowance.amount),
    )
