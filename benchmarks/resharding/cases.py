"""`Case`: a pair of layouts on four ranks, and its two ways: as planned, and the plain way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.greedy import greedy
from bagpipe.schedule.resharding.layouts import LAYOUT_KINDS, Layout
from bagpipe.schedule.resharding.plan import Resharding, send_to_all

__all__ = ["COLUMNS", "NUM_RANKS", "Case", "cases"]

NUM_RANKS = 4
#: Features of an example, float32.
COLUMNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pair of layouts.

    Attributes:
        name: ``batch 2 -> features 2``.
        source, target: the layouts.
    """

    name: str
    source: Layout
    target: Layout

    def ways(self, rows: int, network: Network) -> dict[str, Resharding]:
        """The reshardings of `rows` examples by name."""
        arguments = (self.source, self.target, rows, COLUMNS)
        return {"planned": greedy(*arguments, network), "plain": send_to_all(*arguments)}


def cases() -> Iterator[Case]:
    """All pairs of layouts from one to three ranks, three to one, and two to two, where they differ."""
    for count, (before, after) in itertools.product((1, 2, 3), itertools.product(LAYOUT_KINDS, repeat=2)):
        if (count == 1 and before != "batch") or (count == NUM_RANKS - 1 and after != "batch"):
            continue  # one rank has everything, whatever its layout is called
        yield Case(
            name=f"{before} {count} -> {after} {NUM_RANKS - count}",
            source=Layout(kind=before, ranks=tuple(range(count))),
            target=Layout(kind=after, ranks=tuple(range(count, NUM_RANKS))),
        )
