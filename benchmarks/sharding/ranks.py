"""One rank of the measured job: a multilayer perceptron with Adam, step by step on every level; started by torchrun.

    python -m torch.distributed.run --nproc-per-node N -m benchmarks.sharding.ranks --width W --steps S --out FILE

Rank 0 writes, per level: bytes kept at the optimizer's step, bytes sent in a step, seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.distributed.interface import RankGroup
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from bagpipe.types.shard_level import ShardLevel
from benchmarks.sharding.stages import Stages

__all__ = ["LAYERS", "LEVELS", "SCHEDULES", "STAGE_LEVELS", "main"]

LEVELS: tuple[ShardLevel, ...] = ("none", "optimizer", "gradients", "parameters")
#: Of the layers as stages.
STAGE_LEVELS: tuple[ShardLevel, ...] = ("none", "gradients", "parameters")
SCHEDULES = ("breadth-first", "interleaved")
LAYERS = 6
_EXAMPLES = 256


def model_of(width: int) -> nn.Module:
    """Layers of equal size."""
    torch.manual_seed(0)
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages of tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Replicated:
    """The job without division."""

    def __init__(self, model: nn.Module, peers: TorchPeers, stack: ExitStack) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters())
        self.own: list[nn.Parameter] = []
        self._parallel = stack.enter_context(DenseParallel(model, peers.dense))
        buckets = sum(parameter.nbytes for parameter in model.parameters())
        #: An all-reduce sends the others' chunks, and this rank's to the others.
        self.num_sent_bytes = 0
        self._step_bytes = 2 * buckets * (peers.world_size - 1) // peers.world_size

    def step(self, inputs: Tensor, look: Callable[[], None]) -> None:
        """One step; `look` is called when the gradients are summed and the state is there."""
        self.model(inputs).sum().backward()
        self._parallel.reduce()
        self.optimizer.step()
        look()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_sent_bytes += self._step_bytes


class Divided:
    """The job on a level."""

    def __init__(
        self, model: nn.Module, level: ShardLevel, peers: TorchPeers, gathers: RankGroup, stack: ExitStack
    ) -> None:
        self.model = model
        self._shards = ShardedModel(model, find_units(model), level, sums=peers.dense, gathers=gathers)
        stack.enter_context(self._shards)
        self.own = [*self._shards.segments.values()]
        self.optimizer = torch.optim.Adam(self.own)
        self._shards.release_model()

    @property
    def num_sent_bytes(self) -> int:
        """Bytes sent so far."""
        return self._shards.num_sent_bytes

    def step(self, inputs: Tensor, look: Callable[[], None]) -> None:
        """See `Replicated.step`."""
        with self._shards.forward():
            loss = self.model(inputs).sum()
        with self._shards.backward():
            loss.backward()
        self._shards.reduce()
        self.optimizer.step()
        look()
        self._shards.gather()
        self._shards.clear()


def measure(peers: TorchPeers, gathers: RankGroup, level: ShardLevel, width: int, steps: int) -> dict[str, Any]:
    """One level: kept and sent bytes, and the median of a step's seconds without the first two."""
    model, kept = model_of(width), dict[str, int]()
    times: list[float] = []
    sent = 0
    inputs = torch.randn(_EXAMPLES // peers.world_size, width)
    with ExitStack() as stack:
        job: Replicated | Divided
        if level == "none":
            job = Replicated(model, peers, stack)
        else:
            job = Divided(model, level, peers, gathers, stack)

        def look() -> None:
            parameters = [*model.parameters(), *job.own]
            state = [v for s in job.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
            kept.update(
                parameters=bytes_of(parameters), gradients=bytes_of(p.grad for p in parameters), state=bytes_of(state)
            )

        for _ in range(steps):
            before, start_s = job.num_sent_bytes, time.perf_counter()
            job.step(inputs, look)
            times.append(time.perf_counter() - start_s)
            sent = job.num_sent_bytes - before
    return {**kept, "sent": sent, "step_s": statistics.median(times[2:])}


def measure_stages(peers: TorchPeers, level: ShardLevel, schedule: str, width: int, steps: int) -> dict[str, Any]:
    """One level of the layers as stages: as `measure`, and the most bytes of parameters at once."""
    torch.manual_seed(0)
    job = Stages([nn.Linear(width, width) for _ in range(LAYERS)], width, level, schedule, peers)
    parameters, kept = [*job.parameters, *job.own], dict[str, int]()
    times, sent = list[float](), 0
    inputs = torch.randn(_EXAMPLES // peers.world_size, width)

    def look() -> None:
        kept.update(
            parameters=bytes_of(parameters), gradients=bytes_of(p.grad for p in parameters), state=bytes_of(job.states)
        )

    for _ in range(steps):
        before, start_s = job.num_sent_bytes, time.perf_counter()
        job.step(inputs, look)
        times.append(time.perf_counter() - start_s)
        sent = job.num_sent_bytes - before
    most = job.most_whole_bytes or kept["parameters"]
    return {**kept, "most": most, "sent": sent, "step_s": statistics.median(times[2:])}


def main() -> None:
    """Measure all levels, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    membership = Membership.from_environment()
    if membership is None:
        raise InputError("benchmarks.sharding.ranks needs torchrun with several ranks, got one")
    found: dict[str, list[dict[str, Any]]] = {level: [] for level in LEVELS}
    stages = {schedule: {level: list[dict[str, Any]]() for level in STAGE_LEVELS} for schedule in SCHEDULES}
    with TorchPeers(membership, timeout_s=120.0) as peers:
        (gathers,) = peers.open_stage_groups([range(peers.world_size)]).values()
        for _ in range(options.rounds):
            for level in LEVELS:
                found[level].append(measure(peers, gathers, level, options.width, options.steps))
            for schedule, levels in stages.items():
                for level, rounds in levels.items():
                    rounds.append(measure_stages(peers, level, schedule, options.width, options.steps))
        if peers.rank == 0:
            options.out.write_text(json.dumps({"levels": found, "stages": stages}), encoding="utf-8")
        peers.gather(None)


if __name__ == "__main__":
    main()
