"""Alpa's objective in another way: one program over Pareto fronts of (sum, longest), without trying longest times."""

from __future__ import annotations

import numpy as np

from bagpipe.partition.chain import ChainSearch

__all__ = ["pareto_total"]

#: Sum of stage times, the longest of them.
_Ends = tuple[float, float]


def pareto_total(search: ChainSearch) -> float | None:
    """The least step time in seconds; None if no chain fits."""
    size, devices = len(search.order), search.model.cluster.devices
    # fronts[stages][start, devices used]
    last: dict[tuple[int, int], list[_Ends]] = {(size, 0): [(0.0, 0.0)]}
    complete: list[_Ends] = []
    for position in range(search.max_stages):
        fits = search.fits[min(position, len(search.fits) - 1)]
        new: dict[tuple[int, int], list[_Ends]] = {}
        for (end, used), front in last.items():
            for number, replicas in enumerate(search.replicas.tolist()):
                for start in range(end) if used + replicas <= devices else ():
                    time = float(search.times[number, start, end])
                    if fits[number, start, end] and np.isfinite(time):
                        more = [(total + time, max(longest, time)) for total, longest in front]
                        new[start, used + replicas] = _front(new.get((start, used + replicas), []) + more)
        complete += [ends for (start, _), front in new.items() if start == 0 for ends in front]
        last = new
    if not complete:
        return None
    micro_examples = search.model.batch_examples / search.microbatches
    return min(total + (search.microbatches - 1) * longest for total, longest in complete) * micro_examples


def _front(ends: list[_Ends]) -> list[_Ends]:
    kept: list[_Ends] = []
    for total, longest in sorted(ends):
        if not kept or longest < kept[-1][1]:
            kept.append((total, longest))
    return kept
