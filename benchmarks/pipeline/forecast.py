"""Predicted step time: the simulator combines costs of actions and messages that were measured separately.

actions    timed in steps of another schedule, over the real links, without their waits for messages
messages   ping-pong: from one process's send until the other process continues
step       simulate(program, costs, latency).makespan
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median

import torch
from torch import Tensor

from bagpipe.distributed.interface import Pending, StageLinks
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.step_program import StepProgram
from benchmarks.pipeline.runners import SCHEDULES
from benchmarks.pipeline.workload import Process, Workload, make_step

__all__ = ["RUNNER_S", "TimedLinks", "forecast", "ping_pong"]


#: Overhead of the runner per action: requirements, clock, progress (README.md).
RUNNER_S = 3.5e-6


def forecast(peers: TorchPeers, links: StageLinks, workload: Workload, schedule: str) -> float:
    """Predicted seconds per step, from steps of another schedule. Both ranks call it together."""
    other = next(name for name in SCHEDULES if name != schedule)
    passage_s = ping_pong(peers, links, workload.message_shape, times=400)
    costs: dict[str, float] = {}
    for own in peers.gather(_action_costs(peers, links, workload, make_step(workload, other))):
        costs.update(own)
    return simulate(make_step(workload, schedule).program, costs, latency=passage_s).makespan


def _action_costs(peers: TorchPeers, links: StageLinks, workload: Workload, step: StepProgram) -> dict[str, float]:
    """Mean seconds of each op of this process, without waits for messages, with the runner's overhead."""
    timed = TimedLinks(links)
    own = Process(workload, step, process=peers.rank, links=timed)
    spent: dict[str, list[float]] = defaultdict(list)

    def measured(text: str, handler: Handler) -> Handler:
        def run(index: int) -> None:
            timed.waited_s = 0.0
            start_s = time.perf_counter()
            handler(index)
            spent[text].append(time.perf_counter() - start_s - timed.waited_s + RUNNER_S)

        return run

    handlers = {text: measured(text, handler) for text, handler in own.handlers_of(workload.steps).items()}
    peers.gather(None)
    Runner(own.loop(), handlers).run()
    # The simulator looks up stage and op.
    return {text.partition(":")[0]: mean(times) for text, times in spent.items() if "X_READ" not in text}


class TimedLinks:
    """Links that measure how long one lane waits for transfers.

    Attributes:
        waited_s: since it was last set to 0.
    """

    def __init__(self, links: StageLinks) -> None:
        self.waited_s = 0.0
        self._links = links

    def send(self, process: int, tag: int, tensor: Tensor) -> _Timed:
        return _Timed(self, self._links.send(process, tag, tensor))

    def receive(self, process: int, tag: int, tensor: Tensor) -> _Timed:
        return _Timed(self, self._links.receive(process, tag, tensor))


class _Timed:
    def __init__(self, links: TimedLinks, pending: Pending) -> None:
        self._links = links
        self._pending = pending

    def wait(self) -> None:
        start_s = time.perf_counter()
        self._pending.wait()
        self._links.waited_s += time.perf_counter() - start_s


def ping_pong(peers: TorchPeers, links: StageLinks, shape: Sequence[int], *, times: int) -> float:
    """Median seconds from before a send until the receiver continues, for float32 messages of a shape."""
    other, out, back = 1 - peers.rank, torch.ones(*shape), torch.empty(*shape)
    rounds = []
    peers.gather(None)
    for turn in range(times):
        pending = links.receive(other, turn % 2, back)
        if peers.rank == 1:
            pending.wait()
        start_s = time.perf_counter()
        sent = links.send(other, turn % 2, out)
        if peers.rank == 0:
            pending.wait()
        rounds.append(time.perf_counter() - start_s)
        sent.wait()
    first: float = peers.gather(median(rounds))[0]
    return first / 2
