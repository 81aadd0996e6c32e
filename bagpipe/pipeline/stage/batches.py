"""`Batches`: the division of a batch's examples among pipes, micro-batches and channels.

    batch number ──> StageBatch (from the caller) ──num_examples──> BatchDivision, cached per size

    pipe k of K      examples [n k // K, n (k + 1) // K) of the replica's n
    micro-batch m    examples [c m // M, c (m + 1) // M) of its pipe's c
    part r of n      examples [c k // M n, c (k + 1) // M n) with k = m n + r, where ranks share a stage

All bounds are rounded down, so the examples common to two micro-batches always lie in the overlap of their exact
shares. The dependencies of a schedule therefore cover all slices. Micro-batches can differ by one example or be empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from bagpipe.oracle.assign import share_bounds
from bagpipe.pipeline.stage.channel import Channel, MicrobatchSlice, take_joined

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["BatchDivision", "Batches", "Flow", "StageBatch", "bounds", "flow", "part_intervals"]

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


#: First and end of consecutive examples.
Interval: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Flow:
    """Division of a batch in a channel.

    Attributes:
        sent: per micro-batch of the sender, its rows that travel, in one message: intervals, ascending.
        sizes: per micro-batch of the sender, its own number of rows.
        counts: per micro-batch of the sender, the rows of its message.
        slices: slices of each micro-batch of the receiver.
        users: per micro-batch of the sender, the number of the receiver's micro-batches that use it.
    """

    sent: tuple[tuple[Interval, ...], ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    slices: tuple[tuple[MicrobatchSlice, ...], ...]
    users: tuple[int, ...]

    def message(self, unit: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What travels of a micro-batch: its tensors, or those of their rows that the receiver needs."""
        rows = self.sent[unit]
        if self.counts[unit] == self.sizes[unit]:
            return list(tensors)
        if len(rows) == 1:
            return [tensor[rows[0][0] : rows[0][1]] for tensor in tensors]
        return [torch.cat([tensor[first:end] for first, end in rows]) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class BatchDivision:
    """Division of a number of examples.

    Attributes:
        pipes: ``[pipes + 1]``, bounds of the pipes, in examples of the replica.
        instances: instance -> its examples in each of its micro-batches, in examples of its pipe.
        senders: by channel number, the examples in each of the sender's micro-batches.
        flows: by channel number.
    """

    pipes: tuple[int, ...]
    instances: Mapping[int, tuple[Interval, ...]]
    senders: tuple[tuple[Interval, ...], ...]
    flows: tuple[Flow, ...]

    def take(self, channels: Sequence[Channel], batch: int, unit: int) -> list[Tensor]:
        """One tensor per value of a receiver's micro-batch, from all instances of a stage. Waits for transfers."""
        return take_joined([(each, batch * each.units, self.flows[each.number].slices[unit]) for each in channels])

    def put(self, channel: Channel, index: int, tensors: Sequence[Tensor]) -> None:
        """Put a micro-batch of the sender into a channel, as far as the receiver needs it."""
        flow, unit = self.flows[channel.number], index % channel.units
        if flow.users[unit]:
            channel.put(index, flow.message(unit, tensors), flow.users[unit])


class Batches:
    """Batches of one process, with their division.

    Args:
        batch: returns a batch by its number.
        num_pipes: pipes of the replica.
        units: instance -> (pipe, micro-batches per batch, part, parts).
        channels: channels by number.
    """

    def __init__(
        self,
        batch: Callable[[int], StageBatch],
        *,
        num_pipes: int,
        units: Mapping[int, tuple[int, int, int, int]],
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
        instances = {
            number: part_intervals(counts[pipe], units, part, parts)
            for number, (pipe, units, part, parts) in self._units.items()
        }
        ends = [
            (
                part_intervals(counts[channel.pipe], channel.units, *channel.sender_part),
                part_intervals(counts[channel.pipe], channel.receiver_units, *channel.receiver_part),
            )
            for channel in self._channels
        ]
        return BatchDivision(pipes, instances, tuple(sender for sender, _ in ends), tuple(flow(*pair) for pair in ends))


def bounds(count: int, parts: int) -> tuple[int, ...]:
    """``[parts + 1]``: bounds of `count` examples divided into `parts` equal parts, rounded down."""
    return share_bounds(count, (1,) * parts)


def part_intervals(count: int, units: int, part: int = 0, parts: int = 1) -> tuple[Interval, ...]:
    """The examples of part `part` of `parts` in each of `units` micro-batches of `count` examples."""
    cuts = bounds(count, units * parts)
    return tuple((cuts[unit * parts + part], cuts[unit * parts + part + 1]) for unit in range(units))


def flow(sender: Sequence[Interval], receiver: Sequence[Interval]) -> Flow:
    """What passes between two instances.

    Args:
        sender, receiver: examples in each of their micro-batches, ascending.
    """
    ends = [end for _, end in sender]
    found: list[list[MicrobatchSlice]] = []
    sent: list[list[Interval]] = [[] for _ in sender]
    counts, users = [0] * len(sender), [0] * len(sender)
    for first, end in receiver:
        found.append([])
        unit = bisect_right(ends, first)
        while unit < len(sender) and sender[unit][0] < end:
            a, b = max(first, sender[unit][0]) - sender[unit][0], min(end, ends[unit]) - sender[unit][0]
            if a < b:
                at = sender[unit][0] + a - first
                found[-1].append(MicrobatchSlice(unit, counts[unit], counts[unit] + b - a, False, at))
                sent[unit].append((a, b))
                counts[unit] += b - a
                users[unit] += 1
            unit += 1
    slices = tuple(
        tuple(replace(part, whole=part.end - part.first == counts[part.unit]) for part in parts) for parts in found
    )
    sizes = tuple(end - first for first, end in sender)
    return Flow(tuple(map(tuple, sent)), sizes, tuple(counts), slices, tuple(users))
