"""Small clusters for tests."""

from __future__ import annotations

from typing import Any

from bagpipe.cluster.model import CacherHosts, ClusterModel, Device, Link, RowRates, StoreServers, TrainerHosts

__all__ = ["cluster", "hosts"]

CPU = Device(memory_bytes=8e9, memory_bytes_per_s=1e10, flops={"float32": 1e11, "float64": 5e10}, call_s=1e-5)
CARD = Device(memory_bytes=16e9, memory_bytes_per_s=1e12, flops={"float32": 1e13})


def hosts(count: int = 2, device: str = "card", **changes: Any) -> TrainerHosts:
    values: dict[str, Any] = {"devices_per_host": 2, "local_link": "local", "port": "net", "usd_per_hour": 3.0}
    return TrainerHosts(hosts=count, device=device, **{**values, **changes})


def cluster(*trainers: TrainerHosts, **changes: Any) -> ClusterModel:
    values: dict[str, Any] = {
        "name": "small",
        "devices": {"cpu": CPU, "card": CARD},
        "links": {"local": Link(bytes_per_s=8e9, latency_s=1e-6), "net": Link(bytes_per_s=1e9, latency_s=2e-5)},
        "stores": StoreServers(
            servers=2,
            port="net",
            rows=(RowRates(row_bytes=136, reads_per_s=2e6, writes_per_s=1e6),),
            usd_per_hour=1.0,
        ),
        "cachers": CacherHosts(hosts=1, port="net", ids_per_s=1e7, usd_per_hour=0.5),
    }
    return ClusterModel(trainers=trainers or (hosts(),), **{**values, **changes})
