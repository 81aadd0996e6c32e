"""`Moment`: a piece of a batch's work that uses some chunks at once: a unit's forward, its backward, a step.

The *trace* of a batch is its moments in order. A chunk must be on the device while a moment uses it. What it held
before a use counts only if the use *reads*; so a gradient chunk is dead from its step to the next batch's backward, and
moving it then costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Moment", "Trace", "Use"]


@dataclass(frozen=True, slots=True)
class Use:
    """One chunk in one moment.

    Attributes:
        chunk: its number.
        reads: what it held before is needed.
        writes: it holds something else afterwards.
    """

    chunk: int
    reads: bool = True
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """See above.

    Attributes:
        name: for people, and to compare traces by: ``forward mlp.0``.
        uses: distinct chunks.
    """

    name: str
    uses: tuple[Use, ...]

    @property
    def chunks(self) -> frozenset[int]:
        """The numbers of its chunks."""
        return frozenset(use.chunk for use in self.uses)


Trace: TypeAlias = Sequence[Moment]
