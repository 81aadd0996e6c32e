"""`ClusterModel`: what a job runs on: devices, links, trainer hosts, store servers, cachers, object storage.

    TOML or preset ──cluster_file──> ClusterModel ──network──> Network of ranks ──> partition, forecasts
                                         │
                                         ├─ devices of ranks, in the order of the hosts
                                         └─ stores, cachers, object storage ──> forecasts

Rates are what a program can reach, not what a data sheet promises: presets say which share of it they assume.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from bagpipe.cluster.network import Network
from bagpipe.errors import InputError

__all__ = [
    "COMPUTE_OPS",
    "OTHER_THREADS",
    "CacherHosts",
    "ClusterModel",
    "Device",
    "LaneTimes",
    "Link",
    "ObjectStorage",
    "RowRates",
    "StoreServers",
    "TrainerHosts",
]


#: Operation of `LaneTimes` that stands for a trainer's threads besides its lanes, such as those of collectives.
OTHER_THREADS = "other threads"
#: Operations of the compute lane of a dense part that is trained whole.
COMPUTE_OPS = ("F", "B", "OPT", "X_UPDATE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that computes.

    Attributes:
        memory_bytes: of the device.
        memory_bytes_per_s: bandwidth of that memory.
        flops: operations per second by dtype: float32, tf32, bfloat16, float16, float64.
        call_s: fixed time of one call of an operator (a kernel launch).
    """

    memory_bytes: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    call_s: float = 0.0

    def roofline_s(self, num_flops: float, num_bytes: float, dtype: str = "float32") -> float:
        """Seconds of a call that makes so many operations and moves so many bytes (Williams et al., 2009).

        Raises:
            InputError: the device has no rate for the dtype.
        """
        if dtype not in self.flops:
            raise InputError(f"flops of {dtype}: expected one of {', '.join(self.flops)}")
        return self.call_s + max(num_flops / self.flops[dtype], num_bytes / self.memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of link: a host's port, or the way between two devices of a host.

    Attributes:
        bytes_per_s: in each direction.
        latency_s: from the end of a message at its sender to its arrival.
        message_s: time that a message keeps the link besides that of its bytes.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    message_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRates:
    """Rates of rows of one size.

    Attributes:
        row_bytes: of a record.
        reads_per_s, writes_per_s: rows.
        read_fixed_s, write_fixed_s: time of a batch's request besides that of its rows.
    """

    row_bytes: int
    reads_per_s: float
    writes_per_s: float
    read_fixed_s: float = 0.0
    write_fixed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """Processor time of one operation of the training loop, in its lane.

    Attributes:
        op: as in the loop: ``X_INSERT``; or `OTHER_THREADS`. ``F`` and ``B`` are lookups and row gradients; the dense
            part is extra.
        row_bytes: of a record.
        fixed_s: of a batch.
        item_s: of each id (``X_READ``, ``F``, ``B``, `OTHER_THREADS`) or row (the others).
    """

    op: str
    row_bytes: int
    fixed_s: float
    item_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHosts:
    """Hosts of one kind that train.

    Attributes:
        hosts: number of hosts.
        device: key of `ClusterModel.devices`.
        devices_per_host: one rank each.
        local_link: key of `ClusterModel.links`: between the devices of a host.
        port: key of `ClusterModel.links`: a host's way to other hosts.
        ports: of a host; their bandwidths add up.
        cores: processor cores of a host, for the store's client, the row lanes and, where it is embedded, the cacher.
        memory_bytes: of a host.
        rows: what a rank's store client encodes, sends, receives and decodes.
        lanes: processor times of a rank's operations, where they were measured; they include those of `rows`. Rows on
            a device and collectives are otherwise computed from bandwidths.
        lock_share: part of the other lanes' processor time for which the compute lane waits for the interpreter lock.
        usd_per_hour: price of a host.
    """

    hosts: int
    device: str
    local_link: str
    port: str
    devices_per_host: int = 1
    ports: int = 1
    cores: int = 1
    memory_bytes: float = math.inf
    rows: tuple[RowRates, ...] = ()
    lanes: tuple[LaneTimes, ...] = ()
    lock_share: float = 0.0
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreServers:
    """Store servers of one kind.

    Attributes:
        servers: number of servers; rows are spread evenly.
        port: key of `ClusterModel.links`.
        memory_bytes: of a server.
        rows: what a server answers.
        usd_per_hour: price of a server.
    """

    servers: int
    port: str
    rows: tuple[RowRates, ...]
    memory_bytes: float = math.inf
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacherHosts:
    """Hosts that read the data, look ahead and plan.

    Attributes:
        hosts: number of hosts.
        port: key of `ClusterModel.links`.
        ids_per_s: that one host reads, indexes and plans.
        usd_per_hour: price of a host.
    """

    hosts: int
    port: str
    ids_per_s: float
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStorage:
    """Where checkpoints and data lie.

    Attributes:
        bytes_per_s: in each direction, for the whole job.
        latency_s: of a request.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterModel:
    """A cluster. Ranks are numbered host by host, in the order of `trainers`.

    Attributes:
        name: for reports.
        devices, links: by name.
        trainers: kinds of trainer hosts, at least one.
        stores, cachers, object_storage: None: there is none.
        shared_cores: all processes run on one machine and use so many of its processor cores, on average those that do
            not wait for another process; 0: each has its own. The rates are
            then per second of processor time.

    Raises:
        InputError: a value is out of range, or a name is unknown; one line naming the field.
    """

    name: str
    devices: Mapping[str, Device]
    links: Mapping[str, Link]
    trainers: tuple[TrainerHosts, ...]
    stores: StoreServers | None = None
    cachers: CacherHosts | None = None
    object_storage: ObjectStorage | None = None
    shared_cores: float = 0.0

    def __post_init__(self) -> None:
        if self.shared_cores < 0:
            raise InputError(f"shared_cores: expected at least 0, got {self.shared_cores:g}")
        if not self.trainers:
            raise InputError("trainers: expected at least one kind of hosts, got none")
        for name, value in self._records():
            _check_range(name, value)
        for number, hosts in enumerate(self.trainers):
            _check_known(f"trainers[{number}].device", hosts.device, self.devices)
            for key in ("local_link", "port"):
                _check_known(f"trainers[{number}].{key}", getattr(hosts, key), self.links)
        for name, others in (("stores", self.stores), ("cachers", self.cachers)):
            if others is not None:
                _check_known(f"{name}.port", others.port, self.links)
        if self.stores is not None and not self.stores.rows:
            raise InputError("stores.rows: expected the rates of at least one row size, got none")

    def _records(self) -> Iterator[tuple[str, object]]:
        for kind in ("devices", "links"):
            yield from ((f"{kind}.{name}", record) for name, record in getattr(self, kind).items())
        for number, hosts in enumerate(self.trainers):
            yield f"trainers[{number}]", hosts
        for name in ("stores", "cachers", "object_storage"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    @property
    def num_ranks(self) -> int:
        """Devices of all trainer hosts."""
        return sum(hosts.hosts * hosts.devices_per_host for hosts in self.trainers)

    def usd_per_hour(self, num_ranks: int | None = None) -> float:
        """Price of the hosts of the first ranks, of all store servers and of all cachers."""
        used = dict(self.hosts_of_ranks(num_ranks))
        others = (
            (self.stores.servers * self.stores.usd_per_hour if self.stores else 0.0),
            (self.cachers.hosts * self.cachers.usd_per_hour if self.cachers else 0.0),
        )
        return math.fsum([*(hosts.usd_per_hour for hosts in used.values()), *others])

    def speeds_of_ranks(self, num_ranks: int | None = None) -> tuple[float, ...]:
        """Computation of each rank's device relative to the cluster's first device, by their float32 rates.

        Raises:
            InputError: devices differ, and one has no float32 rate.
        """
        first = self.devices[self.trainers[0].device]
        devices = self.devices_of_ranks(num_ranks)
        if all(device is first for device in devices):
            return (1.0,) * len(devices)
        for name, device in self.devices.items():
            if "float32" not in device.flops and (device is first or device in devices):
                raise InputError(f"devices.{name}.flops: expected a rate of float32, got {', '.join(device.flops)}")
        return tuple(device.flops["float32"] / first.flops["float32"] for device in devices)

    def hosts_of_ranks(self, num_ranks: int | None = None) -> Iterator[tuple[int, TrainerHosts]]:
        """(number of its host, the host's kind) of each of the first `num_ranks` ranks.

        Raises:
            InputError: the cluster has fewer devices.
        """
        count = self.num_ranks if num_ranks is None else num_ranks
        if count > self.num_ranks:
            raise InputError(f"expected a cluster with {count} devices, got {self.num_ranks} of {self.name!r}")
        host = rank = 0
        for hosts in self.trainers:
            for _ in range(hosts.hosts):
                for _ in range(hosts.devices_per_host):
                    if rank == count:
                        return
                    yield host, hosts
                    rank += 1
                host += 1

    def devices_of_ranks(self, num_ranks: int | None = None) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(self.devices[hosts.device] for _, hosts in self.hosts_of_ranks(num_ranks))

    def network(self, num_ranks: int | None = None) -> Network:
        """The network of the first ranks. Hosts of several kinds are all taken for the slowest of them."""
        found = list(self.hosts_of_ranks(num_ranks))
        kinds = list(dict.fromkeys(hosts for _, hosts in found))
        ports = [self.links[hosts.port] for hosts in kinds]
        local = [self.links[hosts.local_link] for hosts in kinds]
        hosts_of = {rank: host for rank, (host, hosts) in enumerate(found) if hosts.devices_per_host > 1}
        return Network(
            bandwidth_bytes_per_s=min(link.bytes_per_s * hosts.ports for link, hosts in zip(ports, kinds, strict=True)),
            latency_s=max(link.latency_s for link in ports),
            message_s=max(link.message_s for link in ports),
            hosts=hosts_of,
            local_bandwidth_bytes_per_s=min(link.bytes_per_s for link in local),
            local_latency_s=max(link.latency_s for link in local),
        )


#: Fields that can be 0.
_MAY_BE_ZERO = frozenset(
    {
        *("call_s", "latency_s", "message_s", "usd_per_hour"),
        *("read_fixed_s", "write_fixed_s", "fixed_s", "item_s", "lock_share"),
    }
)


def _check_range(name: str, record: object) -> None:
    assert dataclasses.is_dataclass(record)
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        where = f"{name}.{each.name}"
        if isinstance(value, Mapping):
            if not value:
                raise InputError(f"{where}: expected at least one, got none")
            for key, number in value.items():
                _check_number(f"{where}.{key}", number, may_be_zero=False)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                _check_range(f"{where}[{number}]", item)
            sizes: dict[str, list[int]] = {}
            for item in value:
                sizes.setdefault(getattr(item, "op", ""), []).append(item.row_bytes)
            for op, own in sizes.items():
                if any(one >= other for one, other in pairwise(own)):
                    raise InputError(f"{where}: expected ascending row_bytes{op and f' of {op}'}, got {own}")
        elif isinstance(value, int | float):
            _check_number(where, value, may_be_zero=each.name in _MAY_BE_ZERO)


def _check_number(where: str, value: float, *, may_be_zero: bool) -> None:
    if not (value >= 0 if may_be_zero else value > 0):
        raise InputError(f"{where}: expected a number {'of at least' if may_be_zero else 'above'} 0, got {value:g}")


def _check_known(where: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise InputError(f"{where}: expected one of {', '.join(known)}, got {name!r}")
