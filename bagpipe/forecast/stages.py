"""`StagedDense`: a dense part in stages, for forecasts: time of a batch and memory, from its schedule's simulation.

operators, devices ──pipedream──> chain of stages ──predict: schedule simulated with messages──> StagedDense
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.partition.cost import CostModel, cluster_of_job
from bagpipe.partition.operators import OperatorGraph
from bagpipe.partition.planner import Problem
from bagpipe.partition.planners import PLANNERS
from bagpipe.partition.predict import predict
from bagpipe.schedule.registry import CHAIN_SCHEDULES

__all__ = ["StagedDense", "staged_dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedDense:
    """A pipeline of stages and its replicas.

    Attributes:
        schedule: name of the schedule.
        stages, replicas, microbatches: numbers; each replica has one rank for each stage.
        step_s: forwards and backwards of a batch, with messages and the sum of gradients over the replicas.
        bubble: as `bagpipe.partition.predict.Prediction`.
        param_bytes: of the largest stage.
        device_bytes: weights, optimizer state and activations of the device that needs most.
    """

    schedule: str
    stages: int
    replicas: int
    microbatches: int
    step_s: float
    bubble: float
    param_bytes: float
    device_bytes: float


def staged_dense(
    graph: OperatorGraph,
    cluster: ClusterModel,
    *,
    ranks: int,
    batch_examples: int,
    stages: int,
    microbatches: int,
    schedule: str,
    weight_copies: float = 3.0,
) -> StagedDense:
    """The chain with the least bottleneck of as many stages, simulated.

    Args:
        graph: the operators, measured on the cluster's first device.
        cluster: what the ranks run on.
        ranks: of the job: stages times replicas.
        batch_examples: of a batch of all replicas.
        stages: of the pipeline.
        microbatches: of a replica's part of a batch.
        schedule: one of `CHAIN_SCHEDULES`.
        weight_copies: memory of a parameter with gradient and optimizer state, in multiples of it.

    Raises:
        InputError: the ranks are no multiple of the stages, the schedule is unknown, the batch has too few examples, or
            there are no such stages; one line.
    """
    if schedule not in CHAIN_SCHEDULES:
        raise InputError(f"schedule: expected one of {', '.join(CHAIN_SCHEDULES)}, got {schedule!r}")
    if ranks % stages:
        raise InputError(f"stages: expected a divisor of the {ranks} ranks, got {stages}")
    replicas = ranks // stages
    if microbatches * replicas > batch_examples:
        raise InputError(
            f"microbatches: expected at most {batch_examples // replicas}, the examples of a replica, got "
            f"{microbatches}"
        )
    devices = cluster_of_job(cluster, ranks, weight_copies=weight_copies)
    model = CostModel(graph, devices, batch_examples)
    found = PLANNERS["pipedream"](Problem(model=model, replicas=(replicas,), microbatches=(microbatches,)))
    if found is None:
        raise InputError(f"stages: the dense part fits no {stages} devices of {devices.memory_bytes:.4g} bytes")
    layout = found.best
    if len(layout) != stages:
        raise InputError(f"stages: expected at most {len(layout)}, more are not faster, got {stages}")
    predicted = predict(model, layout, schedule, relay=True)
    return StagedDense(
        schedule=schedule,
        stages=stages,
        replicas=replicas,
        microbatches=microbatches,
        step_s=predicted.step_s,
        bubble=predicted.bubble,
        param_bytes=max(model.totals(stage.mask).param_bytes for stage in layout),
        device_bytes=max(predicted.memory_bytes),
    )
