"""Seconds of every operation of the training loop on one rank, from the cluster, the job and its rows.

    op                     work                               the slowest of
    X_READ                 the batch's plan                   cachers: ids / rate; their ports
    X_FETCH, X_WRITEBACK   rows between store and staging     the client; the host's port; the servers; their ports:
                                                              all ranks of the job share the last two
    X_EVICT, X_INSERT      rows between staging and slots     device memory, read and written once
    F, B                   dense part; pooling of lookups     measured; device memory
    OPT                    gradients summed, the step         network (ring); measured
    X_UPDATE               row optimizer                      device memory: a record is read and written
    X_PREPULL, X_PULL      rows from their owners             network: the host's port, all to all
    X_PUSH, X_PUSH_LATE    row gradients to their owners      network

A rank owns its share of the rows, and uses those of its examples: ``u(B / N)`` unique rows of N ranks, (N - 1) / N of
them at other ranks. Ranks of one kind behave alike, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bagpipe.cluster.model import ClusterModel, RowRates, TrainerHosts
from bagpipe.errors import InputError
from bagpipe.forecast.job import JobShape

__all__ = ["Work", "loop_costs", "processor_s", "rates_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation.

    Attributes:
        bounds: resource -> seconds that it needs for a batch of one rank.
    """

    bounds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Those of the slowest resource."""
        return max(self.bounds.values(), default=0.0)

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.bounds, key=lambda name: self.bounds[name]) if self.bounds else ""


def rates_at(rows: tuple[RowRates, ...], row_bytes: float) -> tuple[float, float]:
    """(reads, writes) per second of rows of another size, interpolated in the time of a row; beyond, by the bytes."""
    sizes = np.array([each.row_bytes for each in rows], np.float64)
    found = []
    for name in ("reads_per_s", "writes_per_s"):
        times = np.array([1 / getattr(each, name) for each in rows])
        if row_bytes > sizes[-1]:
            time = times[-1] * row_bytes / sizes[-1]
        else:
            time = float(np.interp(row_bytes, sizes, times))
        found.append(1 / time)
    return found[0], found[1]


def loop_costs(cluster: ClusterModel, job: JobShape) -> dict[str, Work]:
    """What each operation takes on the slowest of the job's ranks.

    Raises:
        InputError: the cluster has too few devices, or no store.
    """
    found = list(cluster.hosts_of_ranks(job.ranks))
    if cluster.stores is None:
        raise InputError(f"stores: expected store servers in the cluster {cluster.name!r}, got none")
    kinds = dict.fromkeys(hosts for _, hosts in found)
    speeds = {hosts: speed for (_, hosts), speed in zip(found, cluster.speeds_of_ranks(job.ranks), strict=True)}
    of_kinds = [dict(_works(cluster, job, hosts, speeds[hosts])) for hosts in kinds]
    return {op: max((works[op] for works in of_kinds), key=lambda work: work.seconds) for op in of_kinds[0]}


def _works(cluster: ClusterModel, job: JobShape, hosts: TrainerHosts, speed: float) -> Iterator[tuple[str, Work]]:
    traffic, dense, ranks = job.traffic, job.dense, job.ranks
    device = cluster.devices[hosts.device]
    examples = job.batch_examples / ranks
    fetched, written = _store_rows(job)
    inserted = traffic.fetched + traffic.new if not job.direct else traffic.unique
    yield "X_READ", Work(bounds=dict(_reading(cluster, job)))
    for op, rows, way in (("X_FETCH", fetched, 0), ("X_WRITEBACK", written, 1)):
        yield op, Work(bounds=dict(_store(cluster, hosts, job, rows, way)))
    memory = device.memory_bytes_per_s
    for op, rows in (("X_EVICT", written), ("X_INSERT", inserted)):
        yield op, Work(bounds={"device memory": device.call_s + 2 * rows / ranks * traffic.row_bytes / memory})
    pooled = traffic.ids / ranks * job.dim * 4 / memory
    compute = dense.fixed_s + examples * dense.per_example_s
    yield "F", Work(bounds={"dense part": compute / 3 / speed + pooled})
    yield "B", Work(bounds={"dense part": compute * 2 / 3 / speed + pooled})
    network = cluster.network(ranks)
    step = {"optimizer": dense.step_s / speed}
    if ranks > 1:
        step["network"] = network.all_reduce_s(dense.param_bytes, range(ranks)) + dense.step_s / speed
    yield "OPT", Work(bounds=step)
    update = 2 * traffic.unique / ranks * traffic.row_bytes / memory
    if ranks == 1:
        yield "X_UPDATE", Work(bounds={"device memory": device.call_s + update})
        return
    used = float(job.uniques.unique_at(examples)) * (ranks - 1) / ranks  # rows of other ranks that a rank uses
    near = (min(hosts.devices_per_host, ranks) - 1) / (ranks - 1)  # share of them on its own host
    byte_s = max(near / network.local_bandwidth_bytes_per_s, (1 - near) / network.rank_bandwidth_bytes_per_s(ranks))
    message_s = network.message_s * (ranks - 1) + network.latency_s
    # Rows that two consecutive batches use cannot travel ahead: about as many as the hits of the cache would be.
    now = used * _kept(job)
    late = used - now
    weights = job.dim * 4
    for op, rows in (("X_PREPULL", late), ("X_PULL", now), ("X_PUSH", now), ("X_PUSH_LATE", late)):
        yield op, Work(bounds={"network": message_s + rows * weights * byte_s})
    yield "X_UPDATE", Work(bounds={"device memory": device.call_s + update * _kept(job)})
    yield "X_UPDATE_LATE", Work(bounds={"device memory": device.call_s + update * (1 - _kept(job))})
    yield "X_ACK", Work(bounds={"network": network.latency_s + network.message_s})


def processor_s(cluster: ClusterModel, job: JobShape, works: Mapping[str, Work]) -> float:
    """Processor time of a batch on a machine whose processes share its cores: computation, clients, server, cacher.

    What moves bytes of rows on the device is computation there.
    """
    stores = cluster.stores
    assert stores is not None, "checked by loop_costs"
    hosts = cluster.trainers[0]
    fetched, written = _store_rows(job)
    rows_s = 0.0
    for rows, way in ((fetched, 0), (written, 1)):
        rows_s += rows / rates_at(stores.rows, job.traffic.row_bytes)[way]
        if hosts.rows:
            rows_s += rows / rates_at(hosts.rows, job.traffic.row_bytes)[way]
    planning_s = job.traffic.ids / cluster.cachers.ids_per_s if cluster.cachers is not None else 0.0
    of_ranks = sum(max(work.bounds.get(name, 0.0) for name in _COMPUTED) for work in works.values())
    return rows_s + planning_s + job.ranks * of_ranks


#: Resources of `Work.bounds` that are a processor's where the device is one.
_COMPUTED = ("dense part", "device memory", "optimizer")


def _store_rows(job: JobShape) -> tuple[float, float]:
    """Rows of a batch that are read from the store and written to it."""
    traffic = job.traffic
    return (traffic.unique, traffic.unique) if job.direct else (traffic.fetched, traffic.written)


def _kept(job: JobShape) -> float:
    """Share of a batch's rows that the next batch uses too, from the unique rows of two batches together."""
    one = float(job.uniques.unique_at(job.batch_examples))
    two = float(job.uniques.unique_at(2 * job.batch_examples))
    return min(1.0, max(0.0, (2 * one - two) / one))


def _reading(cluster: ClusterModel, job: JobShape) -> Iterator[tuple[str, float]]:
    if cluster.cachers is None:
        return
    cachers = cluster.cachers
    yield "cachers", job.traffic.ids / (cachers.ids_per_s * cachers.hosts)
    # A plan has 4 bytes for each occurrence (inverse, order), 12 for each unique row (slots, ids).
    plan_bytes = 8 * job.traffic.ids + 12 * job.traffic.unique
    yield "cachers' ports", plan_bytes / (cluster.links[cachers.port].bytes_per_s * cachers.hosts)


def _store(
    cluster: ClusterModel, hosts: TrainerHosts, job: JobShape, rows: float, way: int
) -> Iterator[tuple[str, float]]:
    """Seconds of a rank's rows, of one batch; `way` 0: reads, 1: writes."""
    stores = cluster.stores
    assert stores is not None, "checked by loop_costs"
    row_bytes = job.traffic.row_bytes
    port, store_port = cluster.links[hosts.port], cluster.links[stores.port]
    own = rows / job.ranks
    round_trip_s = 2 * (port.latency_s + store_port.latency_s) + port.message_s
    if hosts.rows:
        yield "store client", round_trip_s + own / rates_at(hosts.rows, row_bytes)[way]
    on_host = min(hosts.devices_per_host, job.ranks)
    yield "trainers' ports", round_trip_s + own * on_host * row_bytes / (port.bytes_per_s * hosts.ports)
    yield "store servers", round_trip_s + rows / (stores.servers * rates_at(stores.rows, row_bytes)[way])
    yield "stores' ports", round_trip_s + rows * row_bytes / (stores.servers * store_port.bytes_per_s)
