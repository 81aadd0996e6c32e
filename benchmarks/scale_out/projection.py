"""Rates of a planner in shards, on paper from measured costs, and what saturates first.

    ShardCost ──> ids a second of: the slowest shard, each thread of the cacher, its port ──least──> examples a second

Shards and the threads of the cacher (joining, planner, records) work on different batches at the same time, so the
slowest of them bounds the job. Ranks beyond those measured, faster than that, would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.report import table
from benchmarks.scale.points import Point
from benchmarks.scale_out.shards import ShardCost

__all__ = ["CRITEO_TERABYTE_EXAMPLES", "LINK_BYTES_PER_S", "Projection", "project", "shard_table"]

#: 24 days of Criteo Terabyte.
CRITEO_TERABYTE_EXAMPLES = 4_373_472_329
#: A port of 100 Gbit/s.
LINK_BYTES_PER_S = 12.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Rates in examples per second.

    Attributes:
        shards_per_s: that the slowest shard allows.
        joining_per_s, planner_per_s, records_per_s: that these threads of the cacher allow.
        port_per_s: that the port of the planner's host allows: the shards' results come, the plans go.
        speed_up: over one process that indexes the batches itself.
    """

    shards_per_s: float
    joining_per_s: float
    planner_per_s: float
    records_per_s: float
    port_per_s: float
    speed_up: float

    @property
    def bounds(self) -> Mapping[str, float]:
        """Resource -> examples per second."""
        return {
            "shards": self.shards_per_s,
            "joining": self.joining_per_s,
            "planner": self.planner_per_s,
            "records": self.records_per_s,
            "port": self.port_per_s,
        }

    @property
    def limit(self) -> str:
        """The resource that saturates first."""
        return min(self.bounds, key=lambda name: self.bounds[name])

    @property
    def examples_per_s(self) -> float:
        """What the whole reaches."""
        return self.bounds[self.limit]


def project(point: Point, cost: ShardCost) -> Projection:
    """The rates at a measured point."""
    traffic_bytes = max(cost.shard_mb, cost.plan_mb) * 1e6  # a port carries as much in each direction
    slowest_ms = max(cost.shard_ms, cost.join_ms, cost.planner_ms, cost.records_ms)
    return Projection(
        shards_per_s=point.batch_size / cost.shard_ms * 1e3,
        joining_per_s=point.batch_size / cost.join_ms * 1e3,
        planner_per_s=point.batch_size / cost.planner_ms * 1e3,
        records_per_s=point.batch_size / cost.records_ms * 1e3,
        port_per_s=point.batch_size / traffic_bytes * LINK_BYTES_PER_S,
        speed_up=cost.whole_ms / slowest_ms,
    )


def shard_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The measured points with their rates."""
    headers = (
        "tables", "ranks", "shards", "one process ms", "slowest shard ms", "joining ms", "planner ms", "records ms",
        "shards send MB",
        "plans MB", "largest shard MB", "limit", "over one process", "M examples/s", "hours for 24 days",
    )  # fmt: skip
    rows = []
    for item in found:
        point, cost = Point(**item["point"]), ShardCost(**item["cost"])
        rates = project(point, cost)
        hours = CRITEO_TERABYTE_EXAMPLES / rates.examples_per_s / 3600
        rows.append(
            (
                f"{point.tables}", f"{point.ranks:,}", f"{item['shards']}", f"{cost.whole_ms:.1f}",
                f"{cost.shard_ms:.1f}", f"{cost.join_ms:.1f}", f"{cost.planner_ms:.1f}", f"{cost.records_ms:.1f}",
                f"{cost.shard_mb:.1f}", f"{cost.plan_mb:.1f}",
                f"{cost.shard_state_mb:,.0f}", rates.limit, f"{rates.speed_up:.2f}",
                f"{rates.examples_per_s / 1e6:.3f}", f"{hours:.1f}" if point.tables == 26 else "-",
            )
        )  # fmt: skip
    return table(headers, rows)
