"""`BackwardShares`: which stages compute the backward of a unit of work, where backwards are partial.

    shares 0.5,1 of 4 stages      stage   0  1  2  3           unit u of batch b has the share (place[u] + b) mod 2
    share 0.5: the last 2                 .  .  B  B           place: the units in a random order (the seed's), plus a
    share 1: all 4                        B  B  B  B           random start

Structured partial backward (SPB; Kumar et al., arXiv:2111.10672): a unit computes the backward of the last
share of the stages only. A unit is a micro-batch, or a replica with all its micro-batches. In as many batches as there
are shares, every unit has each share once. A stage's gradient is the mean over the examples of the units that computed
it. Over seeds, each set of so many units is equally likely, so with units of equal size this mean is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bagpipe.errors import ScheduleError

__all__ = ["BackwardShares", "backward_shares", "shares_of_text", "unit_places"]

_WORDS, _GOLDEN = 2**64, 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardShares:
    """The rule of one job. Every rank knows it, so nothing is agreed on at run time.

    Attributes:
        depths: by share, the number of stages, counted from the last one, that compute their backward.
        places: by unit of a batch, its place among the shares of batch 0.
        order: the stages in topological order, so that a stage that computes has all its consumers' gradients.
        pipes: pipes of a replica.
        microbatches: per pipe, each a unit; None: a unit is a replica.
    """

    depths: tuple[int, ...]
    places: tuple[int, ...]
    order: tuple[int, ...]
    pipes: int = 1
    microbatches: int | None = None
    _position: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_position", {stage: place for place, stage in enumerate(self.order)})

    @property
    def num_shares(self) -> int:
        """Batches in which every unit has each share once."""
        return len(self.depths)

    def unit(self, replica: int, pipe: int, micro: int) -> int:
        """The unit of a micro-batch of a pipe."""
        if self.microbatches is None:
            return replica
        return (replica * self.pipes + pipe) * self.microbatches + micro

    def depth(self, batch: int, unit: int) -> int:
        """How many stages, counted from the last one, compute the backward of a unit."""
        return self.depths[(self.places[unit] + batch) % len(self.depths)]

    def computes(self, stage: int, batch: int, unit: int) -> bool:
        """Whether a stage computes the backward of a unit."""
        return self._position[stage] >= len(self.order) - self.depth(batch, unit)


def backward_shares(
    shares: Sequence[float],
    order: Sequence[int],
    *,
    microbatches: int | None,
    pipes: int = 1,
    replicas: int = 1,
    seed: int = 0,
) -> BackwardShares:
    """The rule for some stages. A share computes the stages that it reaches in whole or in part.

    Args:
        shares: 0 to 1; 0: no backward.
        order: the stages in topological order.
        microbatches: per pipe, the same for every stage; None: all of a replica have one share.
        pipes: of a replica.
        replicas: of the pipeline.
        seed: of the units' order.

    Raises:
        ScheduleError: no share, one outside 0 to 1, or none that reaches the first stage.
    """
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ScheduleError(f"backward shares must be 0 to 1, at least one, got {_text(shares)}")
    num_stages = len(order)
    # In floating point, three times a third can be a little more than one.
    depths = tuple(math.ceil(share * num_stages - 1e-9) for share in shares)
    if max(depths) < num_stages:
        raise ScheduleError(
            f"backward shares {_text(shares)} never reach stage {order[0]} of {num_stages}, which would not be "
            f"trained: one of them must be above {(num_stages - 1) / num_stages:.3g}"
        )
    num_units = replicas if microbatches is None else replicas * pipes * microbatches
    return BackwardShares(
        depths=depths,
        places=unit_places(seed, num_units, len(shares)),
        order=tuple(order),
        pipes=pipes,
        microbatches=microbatches,
    )


def unit_places(seed: int, num_units: int, num_shares: int) -> tuple[int, ...]:
    """Place of each unit among the shares of batch 0: its rank in a random order of the units, plus a random start.

    The random numbers are splitmix64's from the mixed seed: one for the start, then one per unit.
    """
    state = _mix((seed + 1) * _GOLDEN)
    start, *words = (_mix(state + count * _GOLDEN) for count in range(1, num_units + 2))
    rank = {unit: rank for rank, unit in enumerate(sorted(range(num_units), key=lambda unit: (words[unit], unit)))}
    return tuple((start + rank[unit]) % num_shares for unit in range(num_units))


def _mix(word: int) -> int:
    """The finaliser of splitmix64, as `bagpipe.types.splitmix64` has it for arrays: pictures start without numpy."""
    word %= _WORDS
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % _WORDS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % _WORDS
    return word ^ word >> 31


def shares_of_text(text: str) -> tuple[float, ...]:
    """The numbers of a text such as ``0.5,1``.

    Raises:
        ScheduleError: it is another text.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(f"expected backward shares such as 0.5,1, got {text!r}") from None


def _text(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares) or "none"
