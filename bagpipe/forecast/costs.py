"""Seconds of every operation of the training loop on one rank, from the cluster, the job and its rows.

    op                     work                               the slowest of
    X_READ                 the batch's plan                   cachers: ids / rate; their ports; the lane
    X_FETCH, X_WRITEBACK   rows between store and staging     the client; the host's port; the servers; their ports:
                                                              all ranks of the job share the last two
    X_EVICT, X_INSERT      rows between staging and slots     the lane, or device memory, read and written once
    F, B                   dense part; pooling of lookups     measured; the lane, or device memory
    OPT                    gradients summed, the step         network (ring); device memory, and the lane
    X_UPDATE               row optimizer                      the lane, or device memory: a record read and written
    X_PREPULL, X_PULL      rows from their owners             network: the host's port, all to all; the lane
    X_PUSH, X_PUSH_LATE    row gradients to their owners      network; the lane

*The lane* is processor time, where it was measured (`TrainerHosts.lanes`). A rank owns its share of the rows, and uses
those of its examples: ``u(B / N)`` unique rows of N ranks, (N - 1) / N of them at other ranks. Ranks of one kind behave
alike, so one of them stands for all. Of a dense part in stages only ranks where micro-batches enter read examples: F
and B together are then the simulated step of the pipeline, between the lookup and the row gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bagpipe.cluster.model import COMPUTE_OPS, OTHER_THREADS, ClusterModel, LaneTimes, RowRates, TrainerHosts
from bagpipe.errors import InputError
from bagpipe.forecast.job import JobShape

__all__ = ["Work", "checkpoint_s", "lock_s", "loop_costs", "processor_s", "request_times"]

#: Passes of an optimizer step through the memory of the parameters: Adagrad reads three tensors and writes two.
_STEP_PASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation.

    Attributes:
        bounds: resource -> seconds that it needs for a batch of one rank.
        processor_s: of these, seconds of a processor, if the device is one too.
    """

    bounds: Mapping[str, float]
    processor_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Those of the slowest resource."""
        return max(self.bounds.values(), default=0.0)

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.bounds, key=lambda name: self.bounds[name]) if self.bounds else ""


def request_times(rows: tuple[RowRates, ...], row_bytes: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """(fixed seconds, seconds of a row) of a read and of a write, interpolated in the size of a row."""
    sizes = [each.row_bytes for each in rows]
    return (
        (
            float(np.interp(row_bytes, sizes, [each.read_fixed_s for each in rows])),
            _at(row_bytes, sizes, [1 / each.reads_per_s for each in rows]),
        ),
        (
            float(np.interp(row_bytes, sizes, [each.write_fixed_s for each in rows])),
            _at(row_bytes, sizes, [1 / each.writes_per_s for each in rows]),
        ),
    )


def _at(row_bytes: float, sizes: Sequence[int], times: Sequence[float]) -> float:
    """Seconds of an item with rows of another size: interpolated; beyond the largest, by the bytes."""
    if row_bytes > sizes[-1]:
        return times[-1] * row_bytes / sizes[-1]
    return float(np.interp(row_bytes, sizes, times))


class _Lanes:
    """Measured processor times of the operations of one kind of hosts, for rows of one size."""

    def __init__(self, lanes: tuple[LaneTimes, ...], row_bytes: float) -> None:
        self._times: dict[str, tuple[float, float]] = {}
        for op in dict.fromkeys(each.op for each in lanes):
            own = [each for each in lanes if each.op == op]
            sizes = [each.row_bytes for each in own]
            fixed_s = float(np.interp(row_bytes, sizes, [each.fixed_s for each in own]))
            self._times[op] = fixed_s, _at(row_bytes, sizes, [each.item_s for each in own])

    def __contains__(self, op: str) -> bool:
        return op in self._times

    def seconds(self, op: str, items: float) -> float:
        """Those of a batch; 0 where the operation was not measured."""
        fixed_s, item_s = self._times.get(op, (0.0, 0.0))
        return fixed_s + items * item_s


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
    traffic, dense, staged, ranks = job.traffic, job.dense, job.staged, job.ranks
    device, lanes = cluster.devices[hosts.device], _Lanes(hosts.lanes, traffic.row_bytes)
    examples, ids = job.batch_examples / job.readers, traffic.ids / job.readers

    def on_device(op: str, rows: float) -> Work:
        """Records that are read and written once."""
        if op in lanes:
            name, seconds = "lane", lanes.seconds(op, rows)
        else:
            moved_s = 2 * rows * traffic.row_bytes / device.memory_bytes_per_s
            name, seconds = "device memory", device.call_s + moved_s
        return Work(bounds={name: seconds}, processor_s=seconds)

    lane_s = lanes.seconds("X_READ", ids)
    yield "X_READ", Work(bounds={**dict(_reading(cluster, job)), "lane": lane_s}, processor_s=lane_s)
    for op, rows, way in (("X_FETCH", job.fetched_rows, 0), ("X_WRITEBACK", job.written_rows, 1)):
        own = rows / ranks
        client_s = lanes.seconds(op, own) if op in lanes else _client_s(hosts, traffic.row_bytes, own, way)
        yield op, Work(bounds=dict(_store(cluster, hosts, job, rows, way, client_s)), processor_s=client_s)
    for op, rows in (("X_EVICT", job.written_rows), ("X_INSERT", job.inserted_rows)):
        yield op, on_device(op, rows / ranks)
    compute = (dense.fixed_s + examples * dense.per_example_s) / speed if staged is None else staged.step_s
    for op, share in (("F", 1 / 3), ("B", 2 / 3)):
        pooled = lanes.seconds(op, ids) if op in lanes else ids * job.dim * 4 / device.memory_bytes_per_s
        yield op, Work(bounds={"dense part": compute * share + pooled}, processor_s=compute * share + pooled)
    if OTHER_THREADS in lanes:
        others_s = lanes.seconds(OTHER_THREADS, ids)
        yield OTHER_THREADS, Work(bounds={"processor": others_s}, processor_s=others_s)
    yield "OPT", _step(cluster, job, hosts, lanes, speed)
    owned = traffic.unique / ranks
    if ranks == 1:
        yield "X_UPDATE", on_device("X_UPDATE", owned)
        return
    used = float(job.uniques.unique_at(examples)) * (ranks - 1) / ranks  # rows of other ranks that a rank uses
    network = cluster.network(ranks)
    near = (min(hosts.devices_per_host, ranks) - 1) / (ranks - 1)  # share of them on its own host
    byte_s = max(near / network.local_bandwidth_bytes_per_s, (1 - near) / network.rank_bandwidth_bytes_per_s(ranks))
    message_s = network.message_s * (ranks - 1) + network.latency_s
    # Rows that two consecutive batches use cannot travel ahead: about as many as the hits of the cache would be.
    now = used * _kept(job)
    late = used - now
    for op, rows in (("X_PREPULL", late), ("X_PULL", now), ("X_PUSH", now), ("X_PUSH_LATE", late)):
        lane_s = lanes.seconds(op, rows)
        bounds = {"network": message_s + rows * job.dim * 4 * byte_s, "lane": lane_s}
        yield op, Work(bounds=bounds, processor_s=lane_s)
    for op, share in (("X_UPDATE", _kept(job)), ("X_UPDATE_LATE", 1 - _kept(job))):
        yield op, on_device(op, owned * share)
    lane_s = lanes.seconds("X_ACK", 0)
    bounds = {"network": network.latency_s + network.message_s, "lane": lane_s}
    yield "X_ACK", Work(bounds=bounds, processor_s=lane_s)


def _step(cluster: ClusterModel, job: JobShape, hosts: TrainerHosts, lanes: _Lanes, speed: float) -> Work:
    """The optimizer's step of a rank, and the sum of the gradients before it."""
    dense, staged = job.dense, job.staged
    param_bytes = dense.param_bytes if staged is None else staged.param_bytes
    stepped_bytes = param_bytes if job.shard == "none" else param_bytes / job.readers
    memory_s = _STEP_PASSES * stepped_bytes / cluster.devices[hosts.device].memory_bytes_per_s
    step_s = lanes.seconds("OPT", 0) + dense.step_s / speed + memory_s
    bounds = {"optimizer": step_s}
    if staged is None and job.ranks > 1:
        # A reduce-scatter and an all-gather are an all-reduce. Parameters in shards are gathered for the backward, too.
        passes = 1.5 if job.shard == "parameters" else 1.0
        bounds["network"] = passes * cluster.network(job.ranks).all_reduce_s(param_bytes, range(job.ranks)) + step_s
    return Work(bounds=bounds, processor_s=step_s)


def _client_s(hosts: TrainerHosts, row_bytes: float, rows: float, way: int) -> float:
    """Processor time of a rank's store client; 0: unknown. `way` 0: reads, 1: writes."""
    if not hosts.rows:
        return 0.0
    fixed_s, row_s = request_times(hosts.rows, row_bytes)[way]
    return fixed_s + rows * row_s


def lock_s(hosts: TrainerHosts, works: Mapping[str, Work]) -> float:
    """Seconds of a batch that the interpreter lock allows: the compute lane, and what it waits for the other lanes."""
    compute_s = sum(works[op].processor_s for op in COMPUTE_OPS)
    others_s = sum(work.processor_s for op, work in works.items() if op not in COMPUTE_OPS)
    return compute_s + hosts.lock_share * others_s


def processor_s(cluster: ClusterModel, job: JobShape, works: Mapping[str, Work]) -> float:
    """Processor time of a batch on a machine whose processes share its cores: computation, clients, server, cacher.

    What moves bytes of rows on the device is computation there.
    """
    stores = cluster.stores
    assert stores is not None, "checked by loop_costs"
    rows, times = (job.fetched_rows, job.written_rows), request_times(stores.rows, job.traffic.row_bytes)
    server_s = sum(fixed_s + each * row_s for each, (fixed_s, row_s) in zip(rows, times, strict=True))
    planning_s = job.traffic.ids / cluster.cachers.ids_per_s if cluster.cachers is not None else 0.0
    return server_s + planning_s + job.ranks * sum(work.processor_s for work in works.values())


def checkpoint_s(cluster: ClusterModel, job: JobShape) -> float:
    """Seconds of a batch in which the object storage takes the job's checkpoints, written beside the training.

    A checkpoint has the rows that were trained since the one before, and the dense part with its optimizer state.
    """
    storage = cluster.object_storage
    if storage is None or not job.checkpoint_every:
        return 0.0
    rows = float(job.uniques.unique_at(job.checkpoint_every * job.batch_examples))
    if job.store_rows:
        rows = min(rows, job.store_rows)
    dense_bytes = max(0.0, job.dense.weight_copies - 1) * job.dense.param_bytes  # gradients are not kept
    num_bytes = rows * job.traffic.row_bytes + dense_bytes
    return (storage.latency_s + num_bytes / storage.bytes_per_s) / job.checkpoint_every


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
    # A plan has 4 bytes for each occurrence (order), 19 for each unique row (id, offset, slot, owner, mark).
    plan_bytes = 4 * job.traffic.ids + 19 * job.traffic.unique
    yield "cachers' ports", plan_bytes / (cluster.links[cachers.port].bytes_per_s * cachers.hosts)


def _store(
    cluster: ClusterModel, hosts: TrainerHosts, job: JobShape, rows: float, way: int, client_s: float
) -> Iterator[tuple[str, float]]:
    """Seconds of a rank's rows, of one batch; `way` 0: reads, 1: writes."""
    stores = cluster.stores
    assert stores is not None, "checked by loop_costs"
    row_bytes = job.traffic.row_bytes
    port, store_port = cluster.links[hosts.port], cluster.links[stores.port]
    own = rows / job.ranks
    round_trip_s = 2 * (port.latency_s + store_port.latency_s) + port.message_s
    if client_s:
        yield "store client", round_trip_s + client_s
    on_host = min(hosts.devices_per_host, job.ranks)
    yield "trainers' ports", round_trip_s + own * on_host * row_bytes / (port.bytes_per_s * hosts.ports)
    fixed_s, row_s = request_times(stores.rows, row_bytes)[way]
    yield "store servers", round_trip_s + fixed_s * job.ranks + rows * row_s / stores.servers
    yield "stores' ports", round_trip_s + rows * row_bytes / (stores.servers * store_port.bytes_per_s)
