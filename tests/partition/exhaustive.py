"""Exhaustive search: every partition of a small graph, with every choice of replicas and micro-batches.

Shares only the cost of a single stage with the searches under test. Bell(8) = 4140 partitions of 8 operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.operators import OperatorGraph

__all__ = ["MAX_OPERATORS", "best_of_all", "fits_all", "orderings"]

MAX_OPERATORS = 8


def best_of_all(model: CostModel, replicas: Sequence[int], microbatches: Sequence[int]) -> tuple[float, Layout] | None:
    """The least bottleneck of all valid layouts, with a layout that has it; None if no layout is valid.

    Raises:
        ValueError: more than `MAX_OPERATORS` operators.
    """
    if model.graph.size > MAX_OPERATORS:
        raise ValueError(f"expected at most {MAX_OPERATORS} operators, got {model.graph.size}")
    best: tuple[float, Layout] | None = None
    choices = list(itertools.product(sorted(replicas), microbatches))
    for masks in orderings(model.graph):
        for layout in _choices(masks, choices, model.cluster.devices):
            bottleneck = model.bottleneck(layout)
            if (best is None or bottleneck < best[0]) and fits_all(model, layout):
                best = bottleneck, layout
    return best


def fits_all(model: CostModel, layout: Sequence[Placed]) -> bool:
    """Whether every stage of a layout in topological order fits its devices."""
    in_flight = model.in_flight(layout)
    return all(model.fits(model.totals(s.mask), s.replicas, n) for s, n in zip(layout, in_flight, strict=True))


def _choices(
    masks: tuple[int, ...], choices: Sequence[tuple[int, int]], devices: int, done: Layout = ()
) -> Iterator[Layout]:
    if len(done) == len(masks):
        yield done
        return
    later = len(masks) - len(done) - 1
    for replicas, count in choices:
        if replicas + later <= devices:
            yield from _choices(masks, choices, devices - replicas, (*done, Placed(masks[len(done)], replicas, count)))


def orderings(graph: OperatorGraph) -> Iterator[tuple[int, ...]]:
    """Every partition into stages that can be ordered, in one such order."""
    for blocks in _partitions(graph.size):
        ordered = _in_order(graph, blocks)
        if ordered is not None:
            yield ordered


def _partitions(size: int) -> Iterator[list[int]]:
    """All partitions of 0 … size-1 into masks."""
    if size == 0:
        yield []
        return
    for blocks in _partitions(size - 1):
        for number in range(len(blocks)):
            yield [*blocks[:number], blocks[number] | 1 << (size - 1), *blocks[number + 1 :]]
        yield [*blocks, 1 << (size - 1)]


def _in_order(graph: OperatorGraph, blocks: list[int]) -> tuple[int, ...] | None:
    """Blocks in topological order; None if they form a cycle."""
    left, done, ordered = list(blocks), 0, []
    while left:
        ready = next((b for b in left if all(not graph.producers[n] & ~(done | b) for n in _bits(b))), None)
        if ready is None:
            return None
        left.remove(ready)
        ordered.append(ready)
        done |= ready
    return tuple(ordered)


def _bits(mask: int) -> list[int]:
    return [n for n in range(mask.bit_length()) if mask >> n & 1]
