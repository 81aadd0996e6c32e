"""`Plan`: the planner's result, as plain data and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagpipe.partition.splits import ALL_BATCH
from bagpipe.schedule.ir.stage_graph import StageGraph

__all__ = ["Alternative", "Partition", "Plan", "StagePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage.

    Attributes:
        operators: names, in topological order.
        replicas: devices that share each micro-batch.
        microbatches: per batch.
        in_flight: peak number of micro-batches in flight.
        forward_s, backward_s: of one micro-batch.
        time_per_example_s: the objective of the search.
        memory_bytes: per device.
        recompute: share of its micro-batches whose activations are recomputed.
        splits: how each operator is divided over the devices: names of `splits.SPLITS`; empty: by examples.
    """

    operators: tuple[str, ...]
    replicas: int
    microbatches: int
    in_flight: int
    forward_s: float
    backward_s: float
    time_per_example_s: float
    memory_bytes: float
    recompute: float = 0.0
    splits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages and their schedule.

    Attributes:
        stages: in topological order, numbered as in `graph`.
        graph: edges, and micro-batches per stage.
        schedule: a name in ``DENSE_SCHEDULES``.
        planner: that found the stages: a name in ``PLANNERS``, or ``whole`` for the model as one stage.
        bottleneck_s: seconds per example of the slowest stage, with relays in a chain.
        step_s: seconds per batch, simulated.
        bubble: as the simulator's: step time over the busiest stage's time, minus 1, without all-reduces.
    """

    stages: tuple[StagePlan, ...]
    graph: StageGraph
    schedule: str
    planner: str
    bottleneck_s: float
    step_s: float
    bubble: float

    @property
    def devices(self) -> int:
        """Devices used."""
        return sum(stage.replicas for stage in self.stages)

    def costs(self) -> dict[str, float]:
        """Costs of the stages for a schedule, in seconds: F, B, and half of B for each of I and W."""
        found: dict[str, float] = {}
        for number, stage in enumerate(self.stages):
            found |= {f"{number}F": stage.forward_s, f"{number}B": stage.backward_s}
            # A linear layer's two gradients take as many multiplications as each other.
            found |= {f"{number}{half}": stage.backward_s / 2 for half in "IW"}
        return found

    def summary(self) -> dict[str, Any]:
        """The partition for JSON."""
        return {
            "schedule": self.schedule,
            "planner": self.planner,
            "devices": self.devices,
            "step_s": self.step_s,
            "bottleneck_s_per_example": self.bottleneck_s,
            "bubble": self.bubble,
            "edges": [list(edge) for edge in self.graph.edges],
            "stages": [
                {
                    "stage": number,
                    "operators": list(stage.operators),
                    "replicas": stage.replicas,
                    "microbatches": stage.microbatches,
                    "in_flight": stage.in_flight,
                    "forward_s": stage.forward_s,
                    "backward_s": stage.backward_s,
                    "time_per_example_s": stage.time_per_example_s,
                    "memory_bytes": stage.memory_bytes,
                    "recompute": stage.recompute,
                    "splits": list(stage.splits or [ALL_BATCH] * len(stage.operators)),
                }
                for number, stage in enumerate(self.stages)
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An alternative to the plan.

    Attributes:
        name: for display.
        partition: its stages.
    """

    name: str
    partition: Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planner's result.

    Attributes:
        partition: the partition with the least step time.
        least_bottleneck_s: the least bottleneck over all micro-batch counts and replicas tried.
        least_chain_bottleneck_s: the same for chains with relays; None: no chain fits.
        exact: no partition has a smaller bottleneck than `least_bottleneck_s`.
        one_device: the model on one device with the best micro-batches; None: it does not fit.
        alternatives: data parallelism, chains by schedule and what each planner found, each with the best micro-batches
            and replicas.
    """

    partition: Partition
    least_bottleneck_s: float
    least_chain_bottleneck_s: float | None
    exact: bool
    one_device: Partition | None
    alternatives: tuple[Alternative, ...]

    @property
    def one_device_wins(self) -> bool:
        return len(self.partition.stages) == 1 and self.partition.devices == 1

    @property
    def speedup(self) -> float | None:
        """Step time of one device over that of the plan; None: one device does not fit, or a step takes no time."""
        if self.one_device is None or not self.partition.step_s:
            return None
        return self.one_device.step_s / self.partition.step_s

    def summary(self) -> dict[str, Any]:
        """The plan for JSON."""
        return {
            **self.partition.summary(),
            "one_device_step_s": None if self.one_device is None else self.one_device.step_s,
            "one_device_wins": self.one_device_wins,
            "speedup": self.speedup,
            "least_bottleneck_s_per_example": self.least_bottleneck_s,
            "least_chain_bottleneck_s_per_example": self.least_chain_bottleneck_s,
            "exact": self.exact,
            "alternatives": [{"name": other.name, **other.partition.summary()} for other in self.alternatives],
        }
