"""`sweep`: forecasts of a grid of jobs and clusters, and the points that no other point beats.

replay settings x ranks x stores x cachers x bandwidths ──grid──> points ──forecast_all──> Point ──pareto──> front
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.forecast.forecast import Forecast, forecast_all, loop_kind
from bagpipe.forecast.job import DenseCosts, JobShape
from bagpipe.forecast.traffic import RowTraffic, UniqueCurve, unique_curve

__all__ = ["Grid", "Point", "grid_points", "pareto_front", "sweep"]

#: Points that are simulated together: enough for the simulator, few enough for a progress bar.
_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is varied.

    Attributes:
        traffic: settings of a replay: batch size, cache, window and policy.
        ranks: numbers of ranks; empty: those of each setting. A setting that was counted for other ranks is used with
            as many slots in all.
        servers: numbers of store servers; empty: the cluster's.
        cachers: numbers of cacher hosts; empty: the cluster's.
        bandwidths: factors of every port's bandwidth.
        direct: without a cache, too.
    """

    traffic: tuple[RowTraffic, ...]
    ranks: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    cachers: tuple[int, ...] = ()
    bandwidths: tuple[float, ...] = (1.0,)
    direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination and its forecast.

    Attributes:
        batch_examples, lookahead, cache_rows, policy, ranks: of the job; `cache_rows` per rank, 0 without a cache.
        servers, cachers, bandwidth: of the cluster; `bandwidth` is a factor.
        forecast: None: the job cannot run there.
        error: why.
    """

    batch_examples: int
    lookahead: int
    cache_rows: int
    policy: str
    ranks: int
    servers: int
    cachers: int
    bandwidth: float
    forecast: Forecast | None
    error: str = ""

    def summary(self) -> dict[str, Any]:
        """The point for JSON."""
        found = self.forecast
        return {
            **{name: getattr(self, name) for name in _SETTING},
            "error": self.error or None,
            "step_s": None if found is None else found.step_s,
            "examples_per_s": None if found is None else found.examples_per_s,
            "usd_per_million_examples": None if found is None else found.usd_per_million_examples,
            "device_bytes": None if found is None else dict(found.device_bytes),
            "limit": None if found is None else found.limit,
            "op_s": None if found is None else dict(found.op_s),
            "shares": None if found is None else dict(found.shares),
            "busy": None if found is None else dict(found.busy),
        }


_SETTING = ("batch_examples", "lookahead", "cache_rows", "policy", "ranks", "servers", "cachers", "bandwidth")


def grid_points(
    cluster: ClusterModel, grid: Grid, dense: DenseCosts, *, dim: int, store_rows: float = 0.0
) -> Iterator[tuple[ClusterModel, JobShape, float]]:
    """(cluster, job, factor of bandwidths) of every combination.

    Raises:
        InputError: the cluster has no stores or cachers whose number could be varied.
    """
    if grid.servers and cluster.stores is None:
        raise InputError(f"stores: expected store servers in the cluster {cluster.name!r}, got none")
    if grid.cachers and cluster.cachers is None:
        raise InputError(f"cachers: expected cacher hosts in the cluster {cluster.name!r}, got none")
    uniques = unique_curve(grid.traffic)
    directs = (False, True) if grid.direct else (False,)
    for servers, cachers, factor in itertools.product(grid.servers or (0,), grid.cachers or (0,), grid.bandwidths):
        varied = _varied(cluster, servers, cachers, factor)
        for traffic, direct in itertools.product(grid.traffic, directs):
            for ranks in grid.ranks or (traffic.ranks,):
                job = _job(traffic, ranks, dense, uniques, dim=dim, store_rows=store_rows, direct=direct)
                if job is not None:
                    yield varied, job, factor


def _job(
    traffic: RowTraffic,
    ranks: int,
    dense: DenseCosts,
    uniques: UniqueCurve,
    *,
    dim: int,
    store_rows: float,
    direct: bool,
) -> JobShape | None:
    """The job; None if its batch has fewer examples than ranks."""
    if ranks > traffic.batch_examples:
        return None
    shared = replace(traffic, ranks=ranks, cache_rows=-(-traffic.total_cache_rows // ranks))
    return JobShape(
        ranks=ranks,
        batch_examples=traffic.batch_examples,
        traffic=shared,
        uniques=uniques,
        dim=dim,
        dense=dense,
        direct=direct,
        store_rows=store_rows,
    )


def _varied(cluster: ClusterModel, servers: int, cachers: int, factor: float) -> ClusterModel:
    stores, planners = cluster.stores, cluster.cachers
    if servers and stores is not None:
        stores = replace(stores, servers=servers)
    if cachers and planners is not None:
        planners = replace(planners, hosts=cachers)
    links = cluster.links
    if factor != 1.0:
        others = (each.port for each in (stores, planners) if each is not None)
        ports = {*(hosts.port for hosts in cluster.trainers), *others}
        links = {
            name: replace(link, bytes_per_s=link.bytes_per_s * (factor if name in ports else 1.0))
            for name, link in links.items()
        }
    return replace(cluster, stores=stores, cachers=planners, links=links)


def sweep(
    points: Sequence[tuple[ClusterModel, JobShape, float]],
    *,
    on_points: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """Forecast all points of a grid.

    Args:
        points: of `grid_points`.
        on_points: called with the numbers of points that are done and of all.
    """
    found: dict[int, Point] = {}
    # Points with one kind of loop are simulated together, so they come one after the other.
    order = sorted(range(len(points)), key=lambda number: repr(loop_kind(points[number][1])))
    for first in range(0, len(points), _AT_ONCE):
        numbers = order[first : first + _AT_ONCE]
        results = forecast_all([points[number][:2] for number in numbers])
        found |= {number: _point(*points[number], result) for number, result in zip(numbers, results, strict=True)}
        on_points(len(found), len(points))
    return [found[number] for number in range(len(points))]


def _point(cluster: ClusterModel, job: JobShape, factor: float, result: Forecast | InputError) -> Point:
    return Point(
        batch_examples=job.batch_examples,
        lookahead=job.traffic.lookahead,
        cache_rows=0 if job.direct else job.traffic.cache_rows,
        policy="direct" if job.direct else job.traffic.policy,
        ranks=job.ranks,
        servers=cluster.stores.servers if cluster.stores else 0,
        cachers=cluster.cachers.hosts if cluster.cachers else 0,
        bandwidth=factor,
        forecast=None if isinstance(result, InputError) else result,
        error=str(result) if isinstance(result, InputError) else "",
    )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats or equals in time of an example, device memory and price together.

    Of equal points, the first. In the order of the time.
    """
    possible = [(number, point.forecast) for number, point in enumerate(points) if point.forecast is not None]
    if not possible:
        return []
    values = np.array(
        [
            (1 / found.examples_per_s, sum(found.device_bytes.values()), found.usd_per_million_examples)
            for _, found in possible
        ]
    )
    kept: list[int] = []
    for place in np.lexsort(values.T[::-1]).tolist():  # by time, then memory, then price
        if not any((values[other] <= values[place]).all() for other in kept):
            kept.append(place)
    return [points[possible[place][0]] for place in kept]
