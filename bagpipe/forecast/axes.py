"""`AXES`: the settings of a sweep's points: how each is varied, read and shown. A new setting takes one row.

    AXES ──flag, parse──> flags of the command ──vary──> combinations ──read──> settings of a point
         ──name, title, text──> JSON, columns of the table and of the report

It imports no numpy: the command's flags come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.schedule.registry import CHAIN_SCHEDULES
from bagpipe.types.shard_level import SHARD_LEVELS

if TYPE_CHECKING:  # it needs numpy
    from bagpipe.forecast.traffic import RowTraffic

__all__ = ["AXES", "Axis", "Case", "Setting", "scaled_ports", "settings_of"]

Setting: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination, before its job is made.

    Attributes:
        cluster: with what is varied of it.
        traffic: the setting of the replay.
        ranks: of the job.
        direct: without a cache.
        bandwidth: factor of every port's bandwidth, that of `cluster` included.
        stages: of the dense part.
        pipeline, microbatches: its schedule and micro-batches, if it has several stages.
        shard: level at which ranks with the same parameters divide them.
        checkpoint_every: batches between two checkpoints; 0: there are none.
    """

    cluster: ClusterModel
    traffic: RowTraffic
    ranks: int
    direct: bool = False
    bandwidth: float = 1.0
    stages: int = 1
    pipeline: str = "1f1b"
    microbatches: int = 4
    shard: str = "none"
    checkpoint_every: int = 0

    @property
    def cache_rows(self) -> int:
        """Slots per rank: those of the replay in all, shared by the ranks; 0 without a cache."""
        return 0 if self.direct else self.traffic.on_ranks(self.ranks).cache_rows

    @property
    def schedule(self) -> str:
        """Of the stages; ``none`` for a dense part that is trained whole."""
        return self.pipeline if self.stages > 1 else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One setting.

    Attributes:
        name: key in `Point.settings` and JSON.
        title: of its column.
        hint: what the column holds, in a few words.
        read: its value in a case.
        text: a value for people.
        usual: its column is left out of the terminal's table where all points have this value; None: never.
        flag: varies it; empty: the settings of the replay do.
        help: of the flag.
        parse: one value of the flag's list; errors are ValueErrors.
        choices: the values that the list can have; empty: numbers above 0.
        switch: the values if the flag is given, for a flag without a list.
        of_cluster: it belongs to the cluster. These vary slowest, so that points with one cluster share its object.
        vary: a case with another value. Raises InputError if the cluster has nothing of the kind.
    """

    name: str
    title: str
    hint: str
    read: Callable[[Case], Setting]
    text: Callable[[Any], str] = str
    usual: Setting | None = None
    flag: str = ""
    help: str = ""
    parse: Callable[[str], Setting] = int
    choices: tuple[str, ...] = ()
    switch: tuple[Setting, ...] = ()
    of_cluster: bool = False
    vary: Callable[[Case, Any], Case] | None = None


def settings_of(case: Case) -> Mapping[str, Setting]:
    """The settings of a case, by the names of the axes."""
    return {axis.name: axis.read(case) for axis in AXES}


def scaled_ports(cluster: ClusterModel, factor: float) -> ClusterModel:
    """The cluster with every port's bandwidth times `factor`. Links inside hosts stay, unless they are ports too."""
    if factor == 1.0:
        return cluster
    others = (each.port for each in (cluster.stores, cluster.cachers) if each is not None)
    ports = {*(hosts.port for hosts in cluster.trainers), *others}
    links = {
        name: replace(link, bytes_per_s=link.bytes_per_s * (factor if name in ports else 1.0))
        for name, link in cluster.links.items()
    }
    return replace(cluster, links=links)


def _with_servers(case: Case, servers: int) -> Case:
    cluster = case.cluster
    if cluster.stores is None:
        raise InputError(f"stores: expected store servers in the cluster {cluster.name!r}, got none")
    return replace(case, cluster=replace(cluster, stores=replace(cluster.stores, servers=servers)))


def _with_cachers(case: Case, cachers: int) -> Case:
    cluster = case.cluster
    if cluster.cachers is None:
        raise InputError(f"cachers: expected cacher hosts in the cluster {cluster.name!r}, got none")
    return replace(case, cluster=replace(cluster, cachers=replace(cluster.cachers, hosts=cachers)))


def _with_bandwidth(case: Case, factor: float) -> Case:
    return replace(case, cluster=scaled_ports(case.cluster, factor), bandwidth=case.bandwidth * factor)


#: In the order of the JSON and of the columns.
AXES: tuple[Axis, ...] = (
    Axis(
        name="batch_examples",
        title="batch",
        hint="examples of the global batch",
        read=lambda c: c.traffic.batch_examples,
    ),
    Axis(name="lookahead", title="window", hint="batches", read=lambda case: case.traffic.lookahead),
    Axis(
        name="cache_rows",
        title="cache",
        hint="rows per rank",
        read=lambda case: case.cache_rows,
        text=lambda rows: str(rows) if rows else "none",
    ),
    Axis(
        name="policy",
        title="policy",
        hint="of eviction; direct: without a cache",
        read=lambda case: "direct" if case.direct else case.traffic.policy,
        flag="--direct",
        help="without a cache, too",
        switch=("", "direct"),
        vary=lambda case, value: replace(case, direct=value == "direct"),
    ),
    Axis(
        name="ranks",
        title="ranks",
        hint="one device each",
        read=lambda case: case.ranks,
        flag="--ranks",
        help="ranks, one device each",
        vary=lambda case, ranks: replace(case, ranks=ranks),
    ),
    Axis(
        name="servers",
        title="servers",
        hint="store servers",
        read=lambda case: case.cluster.stores.servers if case.cluster.stores else 0,
        flag="--servers",
        help="store servers",
        of_cluster=True,
        vary=_with_servers,
    ),
    Axis(
        name="cachers",
        title="cachers",
        hint="cacher hosts",
        read=lambda case: case.cluster.cachers.hosts if case.cluster.cachers else 0,
        flag="--cachers",
        help="cacher hosts",
        of_cluster=True,
        vary=_with_cachers,
    ),
    Axis(
        name="bandwidth",
        title="ports",
        hint="factor of every port's bandwidth",
        read=lambda case: case.bandwidth,
        text=lambda factor: f"x {factor:g}",
        usual=1.0,
        flag="--bandwidths",
        help="factors of every port's bandwidth",
        parse=float,
        of_cluster=True,
        vary=_with_bandwidth,
    ),
    Axis(
        name="stages",
        title="stages",
        hint="of the dense part",
        read=lambda case: case.stages,
        usual=1,
        flag="--stages",
        help="stages of the dense part; each replica of them has one rank for each",
        vary=lambda case, stages: replace(case, stages=stages),
    ),
    Axis(
        name="schedule",
        title="schedule",
        hint="of the stages",
        read=lambda case: case.schedule,
        usual="none",
        flag="--schedules",
        help=f"of several stages: {', '.join(CHAIN_SCHEDULES)}; default: 1f1b",
        parse=str,
        choices=CHAIN_SCHEDULES,
        vary=lambda case, schedule: replace(case, pipeline=schedule),
    ),
    Axis(
        name="microbatches",
        title="micro",
        hint="micro-batches of a batch",
        read=lambda case: case.microbatches if case.stages > 1 else 1,
        usual=1,
        flag="--microbatches",
        help="micro-batches of several stages; default: 4",
        vary=lambda case, microbatches: replace(case, microbatches=microbatches),
    ),
    Axis(
        name="shard",
        title="shard",
        hint="what ranks with the same dense parameters divide",
        read=lambda case: case.shard,
        usual="none",
        flag="--shards",
        help=f"of the dense part: {', '.join(SHARD_LEVELS)}; default: none",
        parse=str,
        choices=SHARD_LEVELS,
        vary=lambda case, shard: replace(case, shard=shard),
    ),
    Axis(
        name="checkpoint_every",
        title="checkpoint",
        hint="batches between two checkpoints",
        read=lambda case: case.checkpoint_every,
        usual=0,
        flag="--checkpoint-every",
        help="batches between two checkpoints; default: no checkpoints",
        vary=lambda case, batches: replace(case, checkpoint_every=batches),
    ),
)
