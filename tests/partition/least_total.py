"""Alpa's objective on a chain: the sum of the stages + (M - 1) times the bottleneck."""

from __future__ import annotations

import numpy as np

from bagpipe.partition.bisect import Layout
from bagpipe.partition.chain import ChainSearch


def least_total(search: ChainSearch) -> tuple[float, Layout] | None:
    """The least step time in seconds under Alpa's objective, and its runs.

    Tries every bottleneck in ascending order until (M - 1) times it alone exceeds the best total.
    """
    micro_examples = search.model.batch_examples / search.microbatches
    best: tuple[float, Layout] | None = None
    for target in np.unique(search.times[np.isfinite(search.times)]).tolist():
        if best is not None and search.microbatches * target * micro_examples >= best[0]:
            break
        found = _least_sum(search, target)
        if found is not None:
            layout = found[1]
            total = (found[0] + (search.microbatches - 1) * search.bottleneck(layout)) * micro_examples
            if best is None or total < best[0]:
                best = total, layout
    return best


def _least_sum(search: ChainSearch, target: float) -> tuple[float, Layout] | None:
    """Least sum of stage times with every stage at most `target`: dynamic programming over (stages, devices, start)."""
    size, most = len(search.order), search.model.cluster.devices
    allowed = np.where((search.times <= target)[None] & search.fits, search.times[None], np.inf)
    none = np.full((most + 1, size + 1), np.inf)
    none[:, size] = 0
    tables, choices = [none], []
    for place in range(search.max_stages):
        new, choice = tables[-1].copy(), np.full((most + 1, size + 1, 2), -1)
        times = allowed[min(place, len(allowed) - 1)]
        for number, replicas in enumerate(search.replicas.tolist()):
            for devices in range(replicas, most + 1):
                through = times[number] + tables[-1][devices - replicas][None, :]
                cut = through.argmin(axis=1)
                value = through[np.arange(size), cut]
                better = np.flatnonzero(value < new[devices, :size])
                new[devices, better] = value[better]
                choice[devices, better, 0] = cut[better]
                choice[devices, better, 1] = replicas
        tables.append(new)
        choices.append(choice)
    if not np.isfinite(tables[-1][most, 0]):
        return None
    stages, start, devices = [], 0, most
    for choice in reversed(choices):
        end, replicas = choice[devices, start].tolist()
        if end >= 0:
            stages.append(search.placed(start, end, replicas))
            start, devices = end, devices - replicas
    return float(tables[-1][most, 0]), tuple(stages)
