"""dynamic: every rank takes the first action that is ready, a backward first (after AxoNN, Singh et al. 2022).

    ready backward ──yes──> do it        else a ready forward, unless as many as allowed are in flight        else wait

The order is free between forwards and backwards only: each stage has its forwards in the order of micro-batches, and
its backwards too. A batch so has the sums of any synchronous schedule, bit for bit.

It cannot deadlock, whatever the limits, if each is at least 1. Let m be the oldest micro-batch that lacks a backward
anywhere, and consider the stages that lack it. All earlier micro-batches are complete, so a stage without F(m) has none
in flight, and the first such stage in the order of the graph has its inputs. If all have F(m), the last of the stages
without B(m) has its gradients. Some rank can therefore act.

The runner finds the order while it trains. This module finds it for given costs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.costs import cost_function
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["dynamic", "limits"]


def limits(graph: StageGraph, in_flight: int = 0) -> tuple[int, ...]:
    """Most micro-batches in flight per rank: `in_flight` on the first one, evenly fewer on each next, 1 on the last.

    P of P ranks give the numbers of 1F1B, ``P - r``, and ``2P - 1`` those of eager-1f1b.

    Args:
        graph: the stages, one per rank.
        in_flight: of the first rank; 0: the number of ranks.

    Raises:
        ScheduleError: `in_flight` is negative.
    """
    if in_flight < 0:
        raise ScheduleError(f"dynamic: micro-batches in flight must be at least 0 (0: as 1f1b), got {in_flight}")
    last = graph.num_stages - 1
    more = (in_flight or graph.num_stages) - 1
    return tuple(1 + (more if not rank else -(-more * (last - rank) // last)) for rank in range(graph.num_stages))


def dynamic(
    graph: StageGraph,
    chunks: int,
    *,
    in_flight: int = 0,
    costs: Mapping[str, float] | None = None,
    latency: float = 0,
) -> Program:
    """The order that ready actions give if they take as long as the costs say; one stage per rank.

    Args:
        graph: the stages.
        chunks: 1.
        in_flight: see `limits`.
        costs: durations of F and B; None: the op table's.
        latency: of a message, in the unit of the costs.

    Raises:
        ScheduleError: a cost or `in_flight` is negative.
    """
    return dense_program(graph, _Run(graph, limits(graph, in_flight), costs, latency).rows())


class _Run:
    """A simulation in time: events are moments at which a rank becomes free or a message arrives."""

    def __init__(
        self, graph: StageGraph, most: tuple[int, ...], costs: Mapping[str, float] | None, latency: float
    ) -> None:
        self._graph = graph
        self._most = most
        self._cost = cost_function(costs)
        self._latency = latency
        self._micro = graph.microbatches
        self._rows: list[list[Action]] = [[] for _ in most]
        self._free_at = [0.0] * len(most)
        #: Per stage, when its forwards and backwards so far have finished.
        self._finished: dict[str, list[list[float]]] = {op: [[] for _ in most] for op in "FB"}

    def rows(self) -> list[list[Action]]:
        times = [0.0]
        while times:
            now = heapq.heappop(times)
            while times and times[0] == now:
                heapq.heappop(times)
            for stage in range(len(self._rows)):
                if self._free_at[stage] <= now and (op := self._ready(stage, now)) is not None:
                    action = Action(stage, op, len(self._finished[op][stage]))
                    done = now + self._cost(action)
                    self._rows[stage].append(action)
                    self._finished[op][stage].append(done)
                    self._free_at[stage] = done
                    for time in {done, done + self._latency}:
                        heapq.heappush(times, time)
        return self._rows

    def _ready(self, stage: int, now: float) -> str | None:
        forwards, backwards = (len(self._finished[op][stage]) for op in "FB")
        if backwards < forwards and self._arrived("B", self._graph.consumers[stage], backwards) <= now:
            return "B"
        has_room = forwards < self._micro and forwards - backwards < self._most[stage]
        return "F" if has_room and self._arrived("F", self._graph.producers[stage], forwards) <= now else None

    def _arrived(self, op: str, sources: tuple[int, ...], unit: int) -> float:
        """When the results of other stages are here; infinity if one of them has not begun."""
        found = [self._finished[op][source] for source in sources]
        return max((own[unit] + self._latency if unit < len(own) else math.inf for own in found), default=0.0)
