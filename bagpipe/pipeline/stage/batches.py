"""`Batches`: the division of a batch's examples among pipes, micro-batches and channels.

    batch number ──> StageBatch (from the caller) ──num_examples──> BatchDivision, cached per size

    pipe k of K      examples [n k // K, n (k + 1) // K) of the replica's n
    micro-batch m    examples [c m // M, c (m + 1) // M) of its pipe's c

All bounds are rounded down, so the examples common to two micro-batches always lie in the overlap of their exact
shares. The dependencies of a schedule therefore cover all slices. Micro-batches can differ by one example or be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bagpipe.oracle.assign import share_bounds
from bagpipe.pipeline.stage.channel import Channel, MicrobatchSlice
from bagpipe.schedule.ir.program import overlapping_units

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["BatchDivision", "Batches", "StageBatch", "bounds", "count_users", "microbatch_slices"]

#: Cached batch sizes. Most data has two: the full batch and the last one.
_MAX_SIZES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBatch:
    """One batch in one process of a replica.

    Attributes:
        inputs: examples that this process reads; None if it reads none.
        num_examples: examples of the replica.
        num_global_examples: examples of all replicas.
        first_example: index of the replica's first example in the global batch.
    """

    inputs: ModelInputs | None
    num_examples: int
    num_global_examples: int
    first_example: int = 0


@dataclass(frozen=True, slots=True)
class _Flow:
    """Division of a batch in a channel.

    Attributes:
        starts: ``[units + 1]``, bounds of the sender's micro-batches, in examples of the pipe.
        slices: slices of each micro-batch of the receiver.
        users: per micro-batch of the sender, the number of the receiver's micro-batches that use it.
    """

    starts: tuple[int, ...]
    slices: tuple[tuple[MicrobatchSlice, ...], ...]
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchDivision:
    """Division of a number of examples.

    Attributes:
        pipes: ``[pipes + 1]``, bounds of the pipes, in examples of the replica.
        instances: instance -> bounds of its micro-batches, in examples of its pipe.
        flows: by channel number.
    """

    pipes: tuple[int, ...]
    instances: Mapping[int, tuple[int, ...]]
    flows: tuple[_Flow, ...]


class Batches:
    """Batches of one process, with their division.

    Args:
        batch: returns a batch by its number.
        num_pipes: pipes of the replica.
        units: instance -> (pipe, micro-batches per batch).
        channels: channels by number.
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
        self._known: dict[int, BatchDivision] = {}

    def get(self, batch: int) -> tuple[StageBatch, BatchDivision]:
        """The batch and its division. Thread-safe."""
        found = self._batch(batch)
        division = self._known.get(found.num_examples)
        if division is None:
            if len(self._known) >= _MAX_SIZES:
                self._known = {}  # replaced, not cleared: another thread can be reading it
            division = self._known[found.num_examples] = self._divide(found.num_examples)
        return found, division

    def _divide(self, num_examples: int) -> BatchDivision:
        pipes = bounds(num_examples, self._num_pipes)
        counts = [end - start for start, end in pairwise(pipes)]
        instances = {number: bounds(counts[pipe], units) for number, (pipe, units) in self._units.items()}
        flows = []
        for channel in self._channels:
            starts = bounds(counts[channel.pipe], channel.units)
            slices = microbatch_slices(starts, bounds(counts[channel.pipe], channel.receiver_units))
            flows.append(_Flow(starts, slices, count_users(slices, channel.units)))
        return BatchDivision(pipes, instances, tuple(flows))


def bounds(count: int, parts: int) -> tuple[int, ...]:
    """``[parts + 1]``: bounds of `count` examples divided into `parts` equal parts, rounded down."""
    return share_bounds(count, (1,) * parts)


def microbatch_slices(sender: tuple[int, ...], receiver: tuple[int, ...]) -> tuple[tuple[MicrobatchSlice, ...], ...]:
    """Pieces of each micro-batch of the receiver, in order of examples; none for an empty micro-batch.

    Args:
        sender, receiver: bounds of their micro-batches over the same examples.
    """
    slices: list[tuple[MicrobatchSlice, ...]] = []
    for unit, (first, end) in enumerate(pairwise(receiver)):
        found = []
        for source in overlapping_units(unit, len(receiver) - 1, len(sender) - 1):
            start, stop = sender[source], sender[source + 1]
            a, b = max(first, start), min(end, stop)
            if a < b:
                found.append(MicrobatchSlice(source, a - start, b - start, (a, b) == (start, stop)))
        slices.append(tuple(found))
    return tuple(slices)


def count_users(slices: tuple[tuple[MicrobatchSlice, ...], ...], units: int) -> tuple[int, ...]:
    """``[units]``: for each of the sender's micro-batches, how many of the receiver's use it."""
    counts = [0] * units
    for part in (part for unit in slices for part in unit):
        counts[part.unit] += 1
    return tuple(counts)
