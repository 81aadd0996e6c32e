"""`forecast`: a job on a cluster in its steady state: step time, what limits it, memory, price.

    JobShape, ClusterModel ──loop_costs──> seconds per op ──prefetch_loop, steady_state──> Forecast

The loop is the one that the runner walks. Costs are means, so a step is one of an even log; start, checkpoints and
evaluations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.forecast.costs import Work, checkpoint_s, lock_s, loop_costs, processor_s
from bagpipe.forecast.job import JobShape
from bagpipe.schedule.analysis.steady_state import SteadyState, steady_state
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop

__all__ = ["Forecast", "forecast", "forecast_all", "loop_kind"]

#: Batches from the last use of rows to their eviction where none leaves right after its batch.
_SPARE, _AT_ONCE = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected.

    Attributes:
        step_s: of a batch.
        op_s: operation -> seconds of a batch on a rank.
        shares: operation -> share of the step that it is responsible for; what is hidden behind others has 0.
        limit: the operation with the largest share, and its slowest resource: ``X_FETCH: store servers``; or what needs
            longer than all of them: ``shared cores``, for the processor time of all processes, ``interpreter lock``,
            for the lanes of one, or ``object storage``, for the checkpoints.
        busy: lane -> share of the time that it works.
        device_bytes: of a rank: dense part, cache and staging.
        store_bytes: of all store servers; 0: unknown.
        usd_per_million_examples: of the job's trainer hosts, all store servers and all cachers.
        examples_per_s: of the job.
    """

    step_s: float
    op_s: Mapping[str, float]
    shares: Mapping[str, float]
    limit: str
    busy: Mapping[str, float]
    device_bytes: Mapping[str, float]
    store_bytes: float
    usd_per_million_examples: float
    examples_per_s: float


def forecast(cluster: ClusterModel, job: JobShape) -> Forecast:
    """Forecast a job.

    Raises:
        InputError: the cluster has too few devices or no store, or something does not fit: which bytes, and where.
    """
    [found] = forecast_all([(cluster, job)])
    if isinstance(found, InputError):
        raise found
    return found


def forecast_all(points: Sequence[tuple[ClusterModel, JobShape]]) -> list[Forecast | InputError]:
    """Forecasts of many jobs, or why there is none. Those with one kind of loop are simulated together."""
    found: list[Forecast | InputError | None] = [None] * len(points)
    works: dict[int, dict[str, Work]] = {}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, (cluster, job) in enumerate(points):
        try:
            works[number] = loop_costs(cluster, job)
            _check_memory(cluster, job, _device_bytes(job))
        except InputError as error:
            found[number] = error
        else:
            kinds.setdefault(loop_kind(job), []).append(number)
    for numbers in kinds.values():
        state = _simulate(points[numbers[0]][1], [works[number] for number in numbers])
        for place, number in enumerate(numbers):
            found[number] = _forecast(*points[number], works[number], state, place)
    return [each for each in found if each is not None]


def loop_kind(job: JobShape) -> tuple[object, ...]:
    """What makes loops different; those of one kind can be simulated together."""
    return (job.prefetch_depth, job.traffic.lookahead, job.write_depth, job.direct, _evict_lag(job), job.ranks > 1)


def _evict_lag(job: JobShape) -> int | None:
    """Batches from the last use of rows to their eviction; None: the loop of direct mode says it."""
    if job.direct:
        return None
    return _AT_ONCE if job.traffic.waiting > 0 else _SPARE


def _simulate(job: JobShape, works: Sequence[Mapping[str, Work]]) -> SteadyState:
    loop = prefetch_loop(
        prefetch_depth=job.prefetch_depth,
        read_ahead=job.traffic.lookahead,
        write_depth=job.write_depth,
        direct=job.direct,
        evict_lag=_evict_lag(job),
        ranks=min(2, job.ranks),  # the loop of any rank of several
    )
    return steady_state(loop, {op: [each[op].seconds for each in works] for op in works[0]})


def _forecast(
    cluster: ClusterModel, job: JobShape, works: Mapping[str, Work], state: SteadyState, place: int
) -> Forecast:
    step_s = float(state.step_s[place])
    op = state.limit(place)
    limit = f"{op}: {works[op].limit}"
    floors = {
        "interpreter lock": max((lock_s(hosts, works) for hosts in cluster.trainers if hosts.lock_share), default=0.0),
        "object storage": checkpoint_s(cluster, job),
    }
    if cluster.shared_cores:
        floors["shared cores"] = processor_s(cluster, job, works) / cluster.shared_cores
    for name, floor_s in floors.items():
        if floor_s > step_s:
            step_s, limit = floor_s, name
    return Forecast(
        step_s=step_s,
        op_s={op: work.seconds for op, work in works.items()},
        shares={op: float(share[place]) for op, share in state.shares.items()},
        limit=limit,
        busy={lane: float(share[place]) for lane, share in state.busy.items()},
        device_bytes=_device_bytes(job),
        store_bytes=job.store_rows * job.traffic.row_bytes,
        usd_per_million_examples=cluster.usd_per_hour(job.ranks) / 3600 * step_s / job.batch_examples * 1e6,
        examples_per_s=job.batch_examples / step_s if step_s else math.inf,
    )


def _device_bytes(job: JobShape) -> dict[str, float]:
    """Bytes on a rank's device, by what holds them."""
    traffic, dense = job.traffic, job.dense
    slots = traffic.unique / job.ranks if job.direct else traffic.cache_rows
    if job.staged is None:
        copies = dense.copies_of_rank(job.shard, job.ranks)
        parts = {
            "parameters": copies * dense.param_bytes,
            "activations": dense.activation_bytes * job.batch_examples / job.ranks,
        }
    else:
        saved = dense.weight_copies - dense.copies_of_rank(job.shard, job.staged.replicas)
        parts = {"stage": job.staged.device_bytes - saved * job.staged.param_bytes}
    staged_rows = job.prefetch_depth * job.inserted_rows + job.write_depth * job.written_rows
    return {
        **parts,
        "cache": slots * traffic.row_bytes,
        "staging": staged_rows / job.ranks * traffic.row_bytes,
    }


def _check_memory(cluster: ClusterModel, job: JobShape, device_bytes: Mapping[str, float]) -> None:
    needed = sum(device_bytes.values())
    for device in dict.fromkeys(hosts.device for _, hosts in cluster.hosts_of_ranks(job.ranks)):
        has = cluster.devices[device].memory_bytes
        if needed > has:
            parts = ", ".join(f"{name} {each:.4g}" for name, each in device_bytes.items())
            raise InputError(f"devices.{device}: expected at most {has:.4g} bytes, got a job of {needed:.4g}: {parts}")
    stores = cluster.stores
    assert stores is not None, "checked by loop_costs"
    stored = job.store_rows * job.traffic.row_bytes
    if stored > stores.servers * stores.memory_bytes:
        raise InputError(
            f"stores: expected at most {stores.servers * stores.memory_bytes:.4g} bytes, {stores.servers} servers of "
            f"{stores.memory_bytes:.4g}, the job's {job.store_rows:.4g} rows need {stored:.4g}"
        )
