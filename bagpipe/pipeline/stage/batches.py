"""`Batches`: a batch's examples, and how stage instances and embedding stages share them.

batch number ──> StageBatch (the caller's) ──num_examples──> Shares: worked out once per size, most batches have one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bagpipe.pipeline.stage.channel import Channel
from bagpipe.pipeline.stage.shares import Piece, bounds, pieces, uses

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["Batches", "Shares", "StageBatch"]

#: Sizes remembered: the common one, the last batch's, and some for data whose batches differ.
_MAX_SIZES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBatch:
    """One batch, seen from one process of a replica.

    Attributes:
        inputs: examples that this process's source reads; None if it reads none.
        num_examples: of the whole replica.
        num_global_examples: of all replicas.
        first_example: number of the replica's first example in the global batch.
    """

    inputs: ModelInputs | None
    num_examples: int
    num_global_examples: int
    first_example: int = 0


@dataclass(frozen=True, slots=True)
class _Flow:
    """How a batch passes through a channel.

    Attributes:
        starts: ``[units + 1]``, where the sender's micro-batches begin, in examples of the pipe.
        made: per micro-batch of the receiver, what it is made of.
        users: per micro-batch of the sender, how many of the receiver's take of it.
    """

    starts: tuple[int, ...]
    made: tuple[tuple[Piece, ...], ...]
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """How a number of examples is shared out.

    Attributes:
        pipes: ``[pipes + 1]``, where the examples of each pipe begin in those of the replica.
        instances: instance -> where its micro-batches begin, in examples of its pipe.
        flows: by number of the channel.
    """

    pipes: tuple[int, ...]
    instances: Mapping[int, tuple[int, ...]]
    flows: tuple[_Flow, ...]


class Batches:
    """Batches of one process.

    Args:
        batch: what the caller knows of a batch.
        num_pipes: pipes of the replica.
        units: instance -> (its pipe, its micro-batches per batch).
        channels: by number.
    """

    def __init__(
        self,
        batch: Callable[[int], StageBatch],
        *,
        num_pipes: int,
        units: Mapping[int, tuple[int, int]],
        channels: Sequence[Channel],
    ) -> None:
        self._batch = batch
        self._num_pipes = num_pipes
        self._units = units
        self._channels = channels
        self._known: dict[int, Shares] = {}

    def get(self, batch: int) -> tuple[StageBatch, Shares]:
        """The batch and its shares. Any thread."""
        found = self._batch(batch)
        shares = self._known.get(found.num_examples)
        if shares is None:
            if len(self._known) >= _MAX_SIZES:
                self._known = {}  # replaced, not cleared: another thread may be looking
            shares = self._known[found.num_examples] = self._share(found.num_examples)
        return found, shares

    def _share(self, num_examples: int) -> Shares:
        pipes = bounds(num_examples, self._num_pipes)
        counts = [end - start for start, end in pairwise(pipes)]
        instances = {number: bounds(counts[pipe], units) for number, (pipe, units) in self._units.items()}
        flows = []
        for channel in self._channels:
            starts = bounds(counts[channel.pipe], channel.units)
            made = pieces(starts, bounds(counts[channel.pipe], channel.receiver_units))
            flows.append(_Flow(starts, made, uses(made, channel.units)))
        return Shares(pipes, instances, tuple(flows))
