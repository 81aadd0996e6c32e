"""`what_if`: the forecasts of a job with twice of one resource: which purchase helps.

    (cluster, job) ──PURCHASES──> clusters and jobs with one resource doubled ──forecast_all──> Gain of each

A cluster file has the prices of hosts and servers. A faster port, link or device has none, so its price per hour is
taken for unchanged: what a reader can pay more for it follows from the time saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from bagpipe.cluster.model import ClusterModel, Device, Link
from bagpipe.errors import InputError
from bagpipe.forecast.forecast import Forecast, forecast_all
from bagpipe.forecast.job import JobShape

__all__ = ["PURCHASES", "Gain", "Purchase", "what_if"]

_Job: TypeAlias = tuple[ClusterModel, JobShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """A resource that can be doubled.

    Attributes:
        name: ``store servers``.
        is_priced: the cluster file has its price.
        vary: the cluster and the job with twice of it; None: there is none of it. Raises InputError if it cannot be.
    """

    name: str
    is_priced: bool
    vary: Callable[[ClusterModel, JobShape], _Job | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Effect of a purchase on a job.

    Attributes:
        purchase: its name.
        is_priced: the price per hour includes it.
        step_s, usd_per_million_examples: with it; None: the job cannot run so.
        faster: step time before over step time with it; None: the job cannot run so.
        dearer: price of an example with it over the price before; None: as `faster`, or there is no price.
        error: why it cannot run.
    """

    purchase: str
    is_priced: bool
    step_s: float | None = None
    usd_per_million_examples: float | None = None
    faster: float | None = None
    dearer: float | None = None
    error: str = ""


def what_if(jobs: Sequence[tuple[ClusterModel, JobShape, Forecast]]) -> list[tuple[Gain, ...]]:
    """The gains of each job, in the order of `PURCHASES`; resources that its cluster lacks are left out.

    Args:
        jobs: cluster, job, and its forecast as it is.
    """
    varied = {
        (number, purchase): changed
        for number, (cluster, job, _) in enumerate(jobs)
        for purchase in PURCHASES
        if (changed := _varied(purchase, cluster, job)) is not None
    }
    possible = {key: changed for key, changed in varied.items() if not isinstance(changed, InputError)}
    outcomes = dict(zip(possible, forecast_all(list(possible.values())), strict=True))
    gains: list[list[Gain]] = [[] for _ in jobs]
    for (number, purchase), changed in varied.items():
        outcome = changed if isinstance(changed, InputError) else outcomes[number, purchase]
        gains[number].append(_gain(purchase, jobs[number][2], outcome))
    return [tuple(own) for own in gains]


def _varied(purchase: Purchase, cluster: ClusterModel, job: JobShape) -> _Job | InputError | None:
    try:
        return purchase.vary(cluster, job)
    except InputError as error:
        return error


def _gain(purchase: Purchase, before: Forecast, outcome: Forecast | InputError) -> Gain:
    if isinstance(outcome, InputError):
        return Gain(purchase=purchase.name, is_priced=purchase.is_priced, error=str(outcome))
    paid = before.usd_per_million_examples
    return Gain(
        purchase=purchase.name,
        is_priced=purchase.is_priced,
        step_s=outcome.step_s,
        usd_per_million_examples=outcome.usd_per_million_examples,
        faster=before.step_s / outcome.step_s if outcome.step_s else math.inf,
        dearer=outcome.usd_per_million_examples / paid if paid else None,
    )


def _more_servers(cluster: ClusterModel, job: JobShape) -> _Job | None:
    stores = cluster.stores
    return None if stores is None else (replace(cluster, stores=replace(stores, servers=2 * stores.servers)), job)


def _more_cachers(cluster: ClusterModel, job: JobShape) -> _Job | None:
    cachers = cluster.cachers
    return None if cachers is None else (replace(cluster, cachers=replace(cachers, hosts=2 * cachers.hosts)), job)


def _more_ranks(cluster: ClusterModel, job: JobShape) -> _Job | None:
    """Twice the ranks on as many hosts as they need, with the slots of all caches as they are.

    A dense part in stages has to be cut and simulated anew for that, so there is no forecast of it here.
    """
    if job.staged is not None:
        return None
    ranks = 2 * job.ranks
    if ranks > cluster.num_ranks:
        cluster = replace(cluster, trainers=tuple(replace(each, hosts=2 * each.hosts) for each in cluster.trainers))
    return cluster, replace(job, ranks=ranks, traffic=job.traffic.on_ranks(ranks))


def _more_trainer_ports(cluster: ClusterModel, job: JobShape) -> _Job | None:
    return replace(cluster, trainers=tuple(replace(each, ports=2 * each.ports) for each in cluster.trainers)), job


def _faster_store_ports(cluster: ClusterModel, job: JobShape) -> _Job | None:
    stores = cluster.stores
    if stores is None:
        return None
    links, port = _with_faster(cluster.links, stores.port)
    return replace(cluster, links=links, stores=replace(stores, port=port)), job


def _faster_local_links(cluster: ClusterModel, job: JobShape) -> _Job | None:
    """Of hosts whose devices exchange rows."""
    if job.ranks == 1 or all(each.devices_per_host == 1 for each in cluster.trainers):
        return None
    links: Mapping[str, Link] = cluster.links
    trainers = []
    for each in cluster.trainers:
        links, name = _with_faster(links, each.local_link)
        trainers.append(replace(each, local_link=name))
    return replace(cluster, links=links, trainers=tuple(trainers)), job


def _with_faster(links: Mapping[str, Link], name: str) -> tuple[dict[str, Link], str]:
    """The links and the name of one more, twice as fast: other hosts may use the old one."""
    new = f"{name}, twice as fast"
    return {**links, new: replace(links[name], bytes_per_s=2 * links[name].bytes_per_s)}, new


def _faster_memory(cluster: ClusterModel, job: JobShape) -> _Job | None:
    def faster(device: Device) -> Device:
        return replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)

    return replace(cluster, devices={name: faster(each) for name, each in cluster.devices.items()}), job


def _faster_computation(cluster: ClusterModel, job: JobShape) -> _Job | None:
    """The dense part is measured, so its times are halved; those of stages hold messages too, so they cannot be."""
    if job.staged is not None:
        return None
    times = [each.name for each in fields(job.dense) if each.name.endswith("_s")]
    return cluster, replace(job, dense=replace(job.dense, **{name: getattr(job.dense, name) / 2 for name in times}))


def _more_cores(cluster: ClusterModel, job: JobShape) -> _Job | None:
    """Of a machine that all processes share."""
    return (replace(cluster, shared_cores=2 * cluster.shared_cores), job) if cluster.shared_cores else None


def _faster_storage(cluster: ClusterModel, job: JobShape) -> _Job | None:
    """For the checkpoints."""
    storage = cluster.object_storage
    if storage is None or not job.checkpoint_every:
        return None
    return replace(cluster, object_storage=replace(storage, bytes_per_s=2 * storage.bytes_per_s)), job


#: What can be doubled, in the order of reports.
PURCHASES: tuple[Purchase, ...] = (
    Purchase(name="ranks", is_priced=True, vary=_more_ranks),
    Purchase(name="store servers", is_priced=True, vary=_more_servers),
    Purchase(name="cacher hosts", is_priced=True, vary=_more_cachers),
    Purchase(name="trainers' ports", is_priced=False, vary=_more_trainer_ports),
    Purchase(name="stores' ports", is_priced=False, vary=_faster_store_ports),
    Purchase(name="links inside hosts", is_priced=False, vary=_faster_local_links),
    Purchase(name="device memory's speed", is_priced=False, vary=_faster_memory),
    Purchase(name="device's computation", is_priced=False, vary=_faster_computation),
    Purchase(name="object storage's bandwidth", is_priced=False, vary=_faster_storage),
    Purchase(name="cores of the machine", is_priced=False, vary=_more_cores),
)
