"""What a step should take: actions and messages are measured apart, the simulator puts them together.

actions    each process runs its own lane, both at the same time, over links that answer at once: nobody waits
messages   ping-pong over the real links: time of a call, and from one process's send to the other's receive
step       simulate(program, costs, latency).makespan
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from bagpipe.peers.groups import TorchPeers
from bagpipe.peers.interface import StageLinks
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.ops import OPS
from bagpipe.schedule.seats import StepProgram
from bagpipe.schedule.simulate import simulate
from benchmarks.pipeline.workload import Process, Workload, make_step

__all__ = ["Message", "forecast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Seconds: of the calls that start a transfer, and from before the send until the receiver goes on."""

    send_s: float
    receive_s: float
    passage_s: float


def forecast(peers: TorchPeers, links: StageLinks, workload: Workload, schedule: str) -> float:
    """Seconds per step, as foretold; by both ranks together."""
    step = make_step(workload, schedule)
    message = _ping_pong(peers, links, workload, times=400)
    peers.gather(None)
    costs: dict[str, float] = {}
    for own in peers.gather(_action_costs(workload, step, peers.rank, message)):
        costs.update(own)
    return simulate(step.program, costs, latency=message.passage_s).makespan


def _action_costs(workload: Workload, step: StepProgram, process: int, message: Message) -> dict[str, float]:
    """Median seconds of each action of the process, its part of what the runner adds included."""
    own = Process(workload, step, process=process, links=_Echo(workload))
    times: dict[str, list[float]] = defaultdict(list)

    def timed(text: str, handler: Handler) -> Handler:
        def run(index: int) -> None:
            start_s = time.perf_counter()
            handler(index)
            times[text].append(time.perf_counter() - start_s)

        return run

    handlers = {text: timed(text, handler) for text, handler in own.handlers_of(workload.steps).items()}
    start_s = time.perf_counter()
    Runner(own.loop(), handlers).run()
    run_s = time.perf_counter() - start_s
    lane = [text for text in times if "X_READ" not in text]
    added_s = (run_s - sum(sum(times[text]) for text in lane)) / sum(len(times[text]) for text in lane)
    costs = {}
    for text in lane:
        op = OPS[text.lstrip("0123456789").partition(":")[0]]
        calls = {"send": message.send_s, "recv": message.receive_s}
        # The simulator looks up stage and op.
        costs[text.partition(":")[0]] = calls.get(op.role, median(times[text])) + added_s
    return costs


def _ping_pong(peers: TorchPeers, links: StageLinks, workload: Workload, *, times: int) -> Message:
    """Messages of a micro-batch to and fro."""
    other, out, back = 1 - peers.rank, torch.ones(workload.message_shape), torch.empty(workload.message_shape)
    sends, receives, rounds = [], [], []
    peers.gather(None)
    for turn in range(times):
        start_s = time.perf_counter()
        pending = links.receive(other, turn % 2, back)
        receives.append(time.perf_counter() - start_s)
        if peers.rank == 1:
            pending.wait()
        send_s = time.perf_counter()
        sent = links.send(other, turn % 2, out)
        sends.append(time.perf_counter() - send_s)
        if peers.rank == 0:
            pending.wait()
        rounds.append(time.perf_counter() - send_s)
        sent.wait()
    both = peers.gather([median(sends), median(receives), median(rounds)])
    return Message(
        send_s=(both[0][0] + both[1][0]) / 2, receive_s=(both[0][1] + both[1][1]) / 2, passage_s=both[0][2] / 2
    )


class _Echo:
    """Links that have always just received something."""

    def __init__(self, workload: Workload) -> None:
        self._values = torch.randn(workload.message_shape)

    def send(self, process: int, tag: int, tensor: Tensor) -> _Done:
        return _Done()

    def receive(self, process: int, tag: int, tensor: Tensor) -> _Done:
        tensor.copy_(self._values) if tensor.shape == self._values.shape else tensor.zero_()
        return _Done()


class _Done:
    def wait(self) -> None:
        """It is."""
