"""Points of sweeps for tests."""

from __future__ import annotations

from typing import Any

from bagpipe.cluster.model import ClusterModel
from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.sweep import Grid, Point, grid_points, sweep
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from tests.cluster.clusters import cluster
from tests.forecast.jobs import DENSE, TRAFFIC

__all__ = ["LAYERS", "made_point", "swept", "unswept"]


#: Layers that take as long as `DENSE` in all.
LAYERS = OperatorGraph(
    operators=tuple(
        Operator(
            name=f"layer{number}",
            forward=Cost(fixed_s=1e-3 / 12, per_example_s=1e-5 / 12),
            backward=Cost(fixed_s=1e-3 / 6, per_example_s=1e-5 / 6),
            param_bytes=1e6,
            activation_bytes=250.0,
            output_bytes=64.0,
        )
        for number in range(4)
    ),
    edges=tuple((f"layer{number}", f"layer{number + 1}") for number in range(3)),
)


def unswept(where: ClusterModel | None = None, *, traffic: tuple[Any, ...] = (TRAFFIC,), **varied: Any) -> list[Point]:
    """The points of a grid without forecasts."""
    return grid_points(where or cluster(), Grid(traffic=traffic, varied=varied), DENSE, dim=16, graph=LAYERS)


def swept(where: ClusterModel | None = None, *, traffic: tuple[Any, ...] = (TRAFFIC,), **varied: Any) -> list[Point]:
    """The points of a grid with forecasts."""
    return sweep(unswept(where, traffic=traffic, **varied))


def made_point(time: float, memory: float, price: float) -> Point:
    """A point with these values and no job."""
    found = Forecast(
        step_s=time,
        op_s={},
        shares={},
        limit="",
        busy={},
        device_bytes={"cache": memory},
        store_bytes=0.0,
        usd_per_million_examples=price,
        examples_per_s=1 / time,
    )
    return Point(settings={}, cluster=cluster(), job=None, forecast=found)
