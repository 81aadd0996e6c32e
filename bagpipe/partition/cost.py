"""The cost model of stages, shared by all searches: time per example, memory and traffic.

    compute  = (M fixed + B per_example / d) / B          d replicas share every micro-batch; M micro-batches of B / M
    transfer = (bytes in + bytes out) / (bandwidth d)     on a link, each way: activations in, gradients of outputs in;
                                                          overlaps compute (`predict` takes the busiest port of an edge)
    sync     = (2 (d-1)/d params / bandwidth + 2 (d-1) latency) / B                 ring all-reduce after the batch
    time per example = max(compute, transfer) + sync
    memory   = weight_copies params + in-flight examples / d * activation bytes     of one device

A tensor counts once in its producing stage and once in every consuming stage. A chain also relays what later stages
need. In flight: one micro-batch more than the deepest consumer (1F1B on a graph). With different sizes it is the least
common multiple of both more, and one more of the stage's own where the consumer's are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from bagpipe.cluster.model import ClusterModel
from bagpipe.cluster.network import Network
from bagpipe.errors import InputError
from bagpipe.partition.operators import OperatorGraph, members

__all__ = ["Cluster", "CostModel", "Placed", "Totals", "cluster_of_job", "in_flight_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices of a job, numbered by rank.

    Attributes:
        devices: number of devices.
        memory_bytes: per device; infinite: not checked.
        weight_copies: memory of a parameter in multiples of its size: 2 for parameter and gradient, 3 with the state of
            Adagrad or momentum, 4 with Adam's.
        network: links between the devices; by default they take no time.
        speeds: per device, computation relative to the device on which operators were measured; empty: 1.

    Raises:
        InputError: a value out of range.
    """

    devices: int
    memory_bytes: float = math.inf
    weight_copies: float = 3.0
    network: Network = field(default_factory=Network)
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices must be at least 1, got {self.devices}")
        if not self.memory_bytes > 0:
            raise InputError(f"memory_bytes must be above 0, got {self.memory_bytes}")
        if not 0 <= self.weight_copies < math.inf:
            raise InputError(f"weight_copies must be a number of at least 0, got {self.weight_copies}")
        if self.speeds and len(self.speeds) != self.devices:
            raise InputError(f"speeds must be one per device, {self.devices}, got {len(self.speeds)}")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise InputError(f"speeds must be above 0, got {self.speeds}")

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike, and each is alone on its host or all are on hosts of one size."""
        return len(set(self.speeds)) <= 1 and len(set(self.host_sizes)) == 1

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Devices of each host, in the order of ranks."""
        return tuple(len(list(group)) for _, group in groupby(map(self.network.host, range(self.devices))))

    def speed(self, ranks: Sequence[int]) -> float:
        """Of the slowest of some devices."""
        return min(self.speeds[rank] for rank in ranks) if self.speeds else 1.0


def cluster_of_job(model: ClusterModel, num_ranks: int | None = None, *, weight_copies: float = 3.0) -> Cluster:
    """The first ranks of a cluster.

    Operators are taken to be measured on its first device. Another one is as much faster as its float32 rate is higher.

    Args:
        model: the cluster.
        num_ranks: None: all.
        weight_copies: as of `Cluster`.

    Raises:
        InputError: the cluster has fewer devices, or one has no float32 rate.
    """
    if num_ranks is not None and num_ranks < 1:
        raise InputError(f"devices must be at least 1, got {num_ranks}")
    devices = model.devices_of_ranks(num_ranks)
    speeds = model.speeds_of_ranks(num_ranks)
    return Cluster(
        devices=len(devices),
        memory_bytes=min(device.memory_bytes for device in devices),
        weight_copies=weight_copies,
        network=model.network(num_ranks),
        speeds=speeds if len(set(speeds)) > 1 else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the operators of a stage, forward plus backward, per example.

    The fixed seconds are per micro-batch, and the parameters are absolute. What enters the stage is a part of its
    activations, and all that a micro-batch keeps that is recomputed. `kept_bytes` are those that a search counts.
    """

    fixed_s: float
    per_example_s: float
    param_bytes: float
    activation_bytes: float
    input_bytes: float
    kept_bytes: float
    transfer_bytes: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A stage of a layout.

    Attributes:
        mask: its operators.
        replicas: devices that share every micro-batch.
        microbatches: per batch.
        splits: how each operator is divided over the devices, in topological order: names of `splits.SPLITS`; empty: by
            examples.
    """

    mask: int
    replicas: int
    microbatches: int
    splits: tuple[str, ...] = ()


class CostModel:
    """Costs of sets of operators of a graph on a cluster. Sums are cached.

    Args:
        graph: the operators.
        cluster: the devices.
        batch_examples: examples of a batch.
        recompute: stages that do not fit recompute their activations. Searches then count what enters a stage as all
            that it keeps; `predict` finds the least that is recomputed, and its time.

    Raises:
        InputError: the batch is empty.
    """

    def __init__(self, graph: OperatorGraph, cluster: Cluster, batch_examples: int, *, recompute: bool = False) -> None:
        if batch_examples < 1:
            raise InputError(f"the batch must have at least 1 example, got {batch_examples}")
        self.graph = graph
        self.cluster = cluster
        self.batch_examples = batch_examples
        self.recompute = recompute
        self._totals: dict[int, Totals] = {}
        self._rings: dict[int, tuple[float, float]] = {}
        #: Of the slowest device: searches that do not say which devices a stage gets assume it.
        self.speed = min(cluster.speeds, default=1.0)
        self.rank_bandwidth_bytes_per_s = cluster.network.rank_bandwidth_bytes_per_s(cluster.devices)

    def totals(self, mask: int) -> Totals:
        """Sums over the operators in `mask`."""
        found = self._totals.get(mask)
        if found is None:
            own = [self.graph.operators[n] for n in members(mask)]
            activation_bytes = math.fsum(op.activation_bytes for op in own)
            input_bytes = math.fsum(self.graph.operators[n].output_bytes for n in self._entering(mask))
            found = self._totals[mask] = Totals(
                fixed_s=math.fsum(op.forward.fixed_s + op.backward.fixed_s for op in own),
                per_example_s=math.fsum(op.forward.per_example_s + op.backward.per_example_s for op in own),
                param_bytes=math.fsum(op.param_bytes for op in own),
                activation_bytes=activation_bytes,
                input_bytes=input_bytes,
                kept_bytes=min(input_bytes, activation_bytes) if self.recompute else activation_bytes,
                transfer_bytes=self._transfer_bytes(mask),
            )
        return found

    def _entering(self, mask: int) -> list[int]:
        """Operators outside that a stage takes from."""
        taken = 0
        for n in members(mask):
            taken |= self.graph.producers[n]
        return members(taken & ~mask)

    def _transfer_bytes(self, mask: int) -> float:
        leaving = [n for n in members(mask) if self.graph.consumers[n] & ~mask]
        return math.fsum(self.graph.operators[n].output_bytes for n in [*leaving, *self._entering(mask)])

    def time_per_example(self, totals: Totals, replicas: int, microbatches: int) -> float:
        """Seconds per example of a stage, on the slowest devices of the cluster."""
        batch = self.batch_examples
        compute = (totals.fixed_s * microbatches / batch + totals.per_example_s / replicas) / self.speed
        transfer = totals.transfer_bytes / (self.rank_bandwidth_bytes_per_s * replicas)
        return max(compute, transfer) + self.sync_s(totals, replicas) / batch

    def sync_s(self, totals: Totals, replicas: int) -> float:
        """Seconds of the all-reduce of gradients over the replicas, once per batch."""
        per_byte_s, fixed_s = self.ring(replicas)
        return totals.param_bytes * per_byte_s + fixed_s

    def ring(self, replicas: int) -> tuple[float, float]:
        """`Network.ring` of as many replicas, the first of them at the start of a host."""
        if replicas not in self._rings:
            self._rings[replicas] = self.cluster.network.ring(range(replicas))
        return self._rings[replicas]

    def memory_bytes(self, totals: Totals, replicas: int, in_flight_examples: float) -> float:
        """Bytes on each device of a stage."""
        return self.cluster.weight_copies * totals.param_bytes + in_flight_examples / replicas * totals.kept_bytes

    def fits(self, totals: Totals, replicas: int, in_flight_examples: float) -> bool:
        """Whether a stage fits its devices."""
        return self.memory_bytes(totals, replicas, in_flight_examples) <= self.cluster.memory_bytes

    def least_replicas(
        self, mask: int, microbatches: int, in_flight_examples: float, target: float, choices: Sequence[int]
    ) -> int | None:
        """The fewest of the ascending `choices` with which a stage meets `target` seconds per example and fits."""
        totals = self.totals(mask)
        if totals.fixed_s * microbatches / self.batch_examples > target * self.speed:
            return None
        for replicas in choices:
            if totals.per_example_s > target * self.speed * replicas:
                continue  # cheaper than the full test; most masks fail here
            if self.time_per_example(totals, replicas, microbatches) > target:
                continue
            if self.fits(totals, replicas, in_flight_examples):
                return replicas
        return None

    def bottleneck(self, layout: Iterable[Placed]) -> float:
        """Seconds per example of the slowest stage."""
        return max(self.time_per_example(self.totals(s.mask), s.replicas, s.microbatches) for s in layout)

    def in_flight(self, layout: Sequence[Placed]) -> list[int]:
        """Examples in flight per stage of a layout in topological order, rounded up; at most a batch."""
        whole = math.lcm(*(stage.microbatches for stage in layout))
        units = [0] * len(layout)
        for number in reversed(range(len(layout))):
            fed = 0
            for operator in members(layout[number].mask):
                fed |= self.graph.consumers[operator]
            below = [
                (units[later], layout[later].microbatches)
                for later in range(number + 1, len(layout))
                if fed & layout[later].mask
            ]
            units[number] = in_flight_units(layout[number].microbatches, below, whole)
        return [-(n * self.batch_examples // -whole) for n in units]


def in_flight_units(microbatches: int, below: Iterable[tuple[int, int]], whole: int) -> int:
    """Examples of a stage in flight, in units of ``1 / whole`` of a batch.

    Args:
        microbatches: micro-batches per batch of the stage; divides `whole`.
        below: (units in flight, micro-batches) of the stages it feeds; empty for a last stage.
        whole: a common multiple of all micro-batch counts.
    """
    size = whole // microbatches
    most = size
    for units, other in below:
        other_size = whole // other
        more = size if other_size < size else 0
        most = max(most, units + math.lcm(size, other_size) + more)
    return min(whole, -(most // -size) * size)
