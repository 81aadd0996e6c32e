"""Interleaved step times of torch.distributed.pipelining and of our runner, for the same schedule and process group.

    every round:  a block of steps by one, then a block by the other     (the order alternates)

A step is forward and backward of all micro-batches, after which the gradients are dropped: no optimizer, no rows, no
data loading. Both compute the loss as a sum over the examples divided by their number.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bagpipe.distributed.interface import StageLinks
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.runner import Runner
from benchmarks.harness.rounds import turns
from benchmarks.pipeline.workload import NUM_STAGES, Process, Workload, loss_sum, make_step

__all__ = ["SCHEDULES", "contest"]

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def contest(
    peers: TorchPeers, links: StageLinks, workload: Workload, schedule: str, *, rounds: int
) -> tuple[dict[str, list[float]], bool]:
    """Seconds per step of ``torch`` and ``ours`` in every round at this rank; whether their gradients are equal."""
    runners: dict[str, _Torch | _Ours] = {
        "torch": _Torch(peers.rank, workload, schedule),
        "ours": _Ours(peers.rank, workload, schedule, links),
    }
    for runner in runners.values():
        runner.run(3)  # first steps allocate, and torch exchanges shapes
    gradients = [runner.gradients() for runner in runners.values()]
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _, name in turns(list(runners), rounds):
        peers.gather(None)  # a barrier: both ranks start together
        times[name].append(runners[name].run(workload.steps))
    return times, _same(*gradients)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


class _Torch:
    def __init__(self, rank: int, workload: Workload, schedule: str) -> None:
        self._rank = rank
        self._inputs = workload.inputs()
        self._module = workload.module(rank)
        stage = PipelineStage(self._module, rank, NUM_STAGES, torch.device("cpu"))

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return loss_sum(0, logits, labels) / workload.examples

        self._schedule = SCHEDULES[schedule](stage, workload.microbatches, loss_fn=loss, scale_grads=False)

    def step(self) -> None:
        if self._rank == 0:
            self._schedule.step(self._inputs.dense)
        else:
            self._schedule.step(target=self._inputs.labels, return_outputs=False)

    def gradients(self) -> list[Tensor]:
        """Gradients of one step."""
        self.step()
        found = [p.grad for p in self._module.parameters() if p.grad is not None]
        self._drop()
        return found

    def _drop(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def run(self, steps: int) -> float:
        """Seconds per step, from the end of the first to the end of the last."""
        stamps = []
        for _ in range(steps):
            self.step()
            self._drop()
            stamps.append(time.perf_counter())
        return (stamps[-1] - stamps[0]) / (steps - 1)


class _Ours:
    def __init__(self, rank: int, workload: Workload, schedule: str, links: StageLinks) -> None:
        self._stamps: list[float] = []
        self._gradients: list[Tensor] = []
        step = make_step(workload, schedule)
        self._process = Process(workload, step, process=rank, links=links, on_step=self._on_step)
        self._parameters = self._process.runtime.parameters(rank)[0]

    def _on_step(self) -> None:
        self._stamps.append(time.perf_counter())
        if len(self._stamps) == 1:
            self._gradients = [p.grad for p in self._parameters if p.grad is not None]

    def gradients(self) -> list[Tensor]:
        """Gradients of one step."""
        self.run(2)
        return self._gradients

    def run(self, steps: int) -> float:
        """Seconds per step, from the end of the first to the end of the last."""
        self._stamps.clear()
        Runner(self._process.loop(), self._process.handlers_of(steps)).run()
        return (self._stamps[-1] - self._stamps[0]) / (steps - 1)
