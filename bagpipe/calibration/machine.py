"""`measure_machine`: this machine as a cluster of one host, whose processes share its cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from bagpipe.calibration.cacher import measure_cacher
from bagpipe.calibration.device import measure_device
from bagpipe.calibration.lanes import measure_lanes
from bagpipe.calibration.link import measure_link
from bagpipe.calibration.rows import measure_rows
from bagpipe.cluster.model import CacherHosts, ClusterModel, StoreServers, TrainerHosts

__all__ = ["measure_machine"]

#: Measurements, for progress: device, link, store server, cacher, jobs.
_MEASUREMENTS = 5


def measure_machine(
    ranks: int = 1, *, on_measured: Callable[[int, int], None] = lambda done, total: None
) -> ClusterModel:
    """The machine with so many ranks, a store server and a cacher. Takes about half a minute.

    Args:
        ranks: of the job: processes with one compute thread each.
        on_measured: called with the numbers of measurements that are done and of all.

    Raises:
        InputError, StoreError: no store server can be started.
        JobError: a job failed.
    """
    device = measure_device()
    memory_bytes = device.memory_bytes / 3  # for trainers, store and cacher
    device = replace(device, memory_bytes=memory_bytes / ranks)
    on_measured(1, _MEASUREMENTS)
    link = measure_link()
    on_measured(2, _MEASUREMENTS)
    server = measure_rows()
    on_measured(3, _MEASUREMENTS)
    ids_per_s = measure_cacher(ranks)
    on_measured(4, _MEASUREMENTS)
    lanes = measure_lanes(ranks)
    on_measured(5, _MEASUREMENTS)
    cores = len(os.sched_getaffinity(0))
    return ClusterModel(
        name="this machine",
        devices={"processor": device},
        links={"loopback": link},
        trainers=(
            TrainerHosts(
                hosts=1,
                device="processor",
                devices_per_host=ranks,
                local_link="loopback",
                port="loopback",
                cores=cores,
                memory_bytes=memory_bytes,
                lanes=lanes.lanes,
                lock_share=lanes.lock_share,
            ),
        ),
        stores=StoreServers(servers=1, port="loopback", rows=server, memory_bytes=memory_bytes),
        cachers=CacherHosts(hosts=1, port="loopback", ids_per_s=ids_per_s),
        # One rank never uses all cores. Several do, but for the times when they wait for each other.
        shared_cores=cores if ranks == 1 else min(cores, lanes.cores_used),
    )
