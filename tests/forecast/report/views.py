"""Sweeps for tests of the report."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from bagpipe.cluster.model import ClusterModel
from bagpipe.forecast.report.view import SweepView, view_of
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import TRAFFIC
from tests.forecast.points import swept

__all__ = ["HOSTILE", "VIEWS", "made", "view"]

#: Untrusted text that would break out of HTML, a script element, an attribute, a label and a template.
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&amp;%{x}\u2028\udcff"

LARGER = replace(TRAFFIC, batch_examples=4096, unique=22_000.0, ids=106_496.0, fetched=1_500.0, written=4_000.0)


def view(
    where: ClusterModel, *, name: str = "", traffic: tuple[Any, ...] = (TRAFFIC, LARGER), **varied: Any
) -> SweepView:
    """The view of a grid on a cluster, under a name."""
    points = swept(where, traffic=traffic, **varied)
    return view_of(points, cluster=where.name, replay=name or "replay.json", model=name or "dense.json")


def _hostile() -> SweepView:
    named = replace(cluster(hosts(4), hosts(1, "cpu")), name=HOSTILE)
    return view(named, name=HOSTILE, traffic=(replace(TRAFFIC, policy=HOSTILE), LARGER), ranks=(1, 4, 99))


@cache
def made(name: str) -> SweepView:
    """A view by its name."""
    free = cluster(hosts(8, usd_per_hour=0.0), stores=replace(cluster().stores, usd_per_hour=0.0), cachers=None)
    slow = {"ranks": (1, 2, 4, 8, 99, 2048), "servers": (1, 2, 4), "bandwidth": (0.01, 0.1, 1.0)}
    return {
        "full": lambda: view(cluster(hosts(8)), policy=("", "direct"), **slow),
        "single": lambda: view(cluster(), traffic=(TRAFFIC,)),
        "free": lambda: view(free, ranks=(1, 2, 4)),
        "attack": _hostile,
    }[name]()


#: Names of the views.
VIEWS = ("full", "single", "free", "attack")
