"""Alpa's program between operators: stages on submeshes with the least sum of times plus (M - 1) times the longest.

    step = sum of the stages' micro-batches + (M - 1) times the longest        M micro-batches, a chain of stages
    least[s, k, d; t] = min over runs k..i and submeshes n of time(k..i, n) + least[s - 1, i, d - n; t]
                        with time <= t                                         for t in ascending order

A submesh is 1, 2, 4, … devices of one host, or whole hosts (Zheng et al., OSDI 2022, section 5). A stage with s - 1
stages after it keeps min(s, M) micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bagpipe.partition.bisect import Layout, least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.planner import Found, Problem

__all__ = ["MOST_TARGETS", "alpa", "least_total", "submeshes"]

#: Longest stage times that are tried on large problems, evenly spread. With fewer different times all are tried.
MOST_TARGETS = 32
#: Operators beyond which they are few.
_LARGE = 24


def submeshes(host_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of devices that a stage can get: powers of two below a host, and whole hosts."""
    host = max(host_sizes)
    inside = [1 << bits for bits in range(host.bit_length()) if 1 << bits < host]
    return (*inside, *(host * hosts for hosts in range(1, sum(host_sizes) // host + 1)))


def alpa(problem: Problem) -> Found | None:
    """The chain with the least step time under Alpa's objective, per number of micro-batches."""
    model = problem.model
    allowed = sorted(set(problem.replicas) & set(submeshes(model.cluster.host_sizes)))
    totals: dict[Layout, tuple[float, float]] = {}
    for count in problem.microbatches if allowed else ():
        search = ChainSearch(model, allowed, count)
        found = least_total(search, MOST_TARGETS if len(search.order) > _LARGE else 0)
        if found is not None:
            totals[found[1]] = found[0], search.bottleneck(found[1])
    if not totals:
        return None
    best = min(totals, key=lambda layout: totals[layout])
    return Found(best=best, bottleneck_s=totals[best][1], layouts=tuple(totals), relay=True)


def least_total(search: ChainSearch, most_targets: int = 0) -> tuple[float, Layout] | None:
    """The least step time in seconds under Alpa's objective, and its runs.

    Args:
        search: the costs of runs.
        most_targets: longest stage times that are tried; 0: all.
    """
    micro_examples = search.model.batch_examples / search.microbatches
    best: tuple[float, Layout] | None = None
    for target in _targets(search, most_targets):
        if best is not None and search.microbatches * target * micro_examples >= best[0]:
            break  # so many times the longest stage alone take as long
        found = _least_sum(search, target)
        if found is not None:
            layout = found[1]
            total = (found[0] + (search.microbatches - 1) * search.bottleneck(layout)) * micro_examples
            if best is None or total < best[0]:
                best = total, layout
    return best


def _targets(search: ChainSearch, most_targets: int) -> Iterator[float]:
    """Longest stage times in ascending order, from the least that is possible."""
    shortest = least_bottleneck(search.bottleneck, search.solve)
    if shortest is None:
        return
    low = search.bottleneck(shortest)
    times = np.unique(search.times[np.isfinite(search.times) & (search.times >= low * (1 - 1e-12))])
    if most_targets and times.size > most_targets:
        # A step has at least M times the longest stage, and this layout's is at most (M + stages) times `low`.
        high = low * (search.microbatches + len(shortest)) / search.microbatches
        times = low * (high / low) ** np.linspace(0, 1, most_targets)
    yield from times.tolist()


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
        if len(allowed) == 1 and np.array_equal(tables[-1], tables[-2]):
            break  # more stages change nothing
    if not np.isfinite(tables[-1][most, 0]):
        return None
    stages, start, devices = [], 0, most
    for choice in reversed(choices):
        end, replicas = choice[devices, start].tolist()
        if end >= 0:
            stages.append(search.placed(start, end, replicas))
            start, devices = end, devices - replicas
    return float(tables[-1][most, 0]), tuple(stages)
