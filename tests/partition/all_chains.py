"""Every chain of a small model, to compare searches with."""

from __future__ import annotations

import itertools

from bagpipe.partition.bisect import Layout
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Placed

__all__ = ["all_chains"]


def all_chains(search: ChainSearch) -> list[Layout]:
    """All partitions of the order into runs, with every choice of replicas that devices and memory allow."""
    found = []
    model, size = search.model, len(search.order)
    for cuts in itertools.product([False, True], repeat=size - 1):
        masks = [1 << search.order[0]]
        for operator, cut in zip(search.order[1:], cuts, strict=True):
            if cut:
                masks.append(0)
            masks[-1] |= 1 << operator
        for replicas in itertools.product(search.replicas.tolist(), repeat=len(masks)):
            layout = tuple(Placed(m, d, search.microbatches) for m, d in zip(masks, replicas, strict=True))
            batch = model.batch_examples
            in_flight = [
                -(min(after + 1, search.microbatches) * batch // -search.microbatches)
                for after in reversed(range(len(masks)))
            ]
            totals = [model.totals(mask) for mask in masks]
            if sum(replicas) <= model.cluster.devices and all(map(model.fits, totals, replicas, in_flight)):
                found.append(layout)
    return found
