"""Random loops for runner tests, with handlers that compute hashes and gates that delay them at random.

random loop ──> Tape.handlers() ──Runner or interpret──> Tape.values, equal for any correct execution
                     └── Gates: a handler waits until the referee, which picks at random, lets it pass
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hypothesis import strategies as st

from bagpipe.pipeline.lane import EndOfBatches
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Hazards, OpKey, Stage

Handlers = dict[str, Callable[[int], None]]

MICRO_OPS = ("F", "B")
BATCH_OPS = ("X_FETCH", "X_INSERT", "X_PULL", "X_PUSH", "X_PUSH_LATE", "X_PLAN", "X_NORM")


class Tape:
    """Values of all actions. Each is a hash of its inputs' values, so that any wrong order shows.

    Args:
        loop: the loop.
        num_batches: the source raises EndOfBatches for this batch.
        hazards: the hazards that the values follow.
    """

    def __init__(self, loop: Loop, num_batches: int, hazards: Hazards) -> None:
        self.values: dict[str, int] = {}
        self.loop = loop
        self.num_batches = num_batches
        graph = Graph(loop.unroll(num_batches), hazards)
        self._sources = {
            action.text: [graph.actions[p.node].text for p in graph.predecessors[node]]
            for node, action in enumerate(graph.actions)
        }

    def do(self, key: OpKey, index: int) -> None:
        if key == self.loop.source and index >= self.num_batches:
            raise EndOfBatches
        text = f"{key[0]}{key[1]}{index}"
        assert text not in self.values, f"{text} ran twice"
        # A KeyError here means that an action ran before one of its requirements.
        self.values[text] = hash((text, *(self.values[source] for source in self._sources[text])))

    def handlers(self, before: Callable[[str], None] = lambda text: None) -> Handlers:
        def handler(key: OpKey) -> Callable[[int], None]:
            def act(index: int) -> None:
                before(f"{key[0]}{key[1]}{index}")
                self.do(key, index)

            return act

        return {f"{t.stage}{t.op}": handler(t.key) for _, t in self.loop.templates}


class Gates:
    """Delays without clocks: every handler waits at a gate; a referee lets handlers pass in random order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._arrived: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()

    def pass_through(self, text: str) -> None:
        gate = threading.Event()
        self._arrived.put(gate)
        assert gate.wait(30), f"{text} was never let through"

    def _referee(self) -> None:
        waiting: list[threading.Event] = []
        open_ = True
        while open_ or waiting:
            if open_ and (not waiting or self._random.random() < 0.7):
                try:
                    arrived = self._arrived.get(block=not waiting)
                except queue.Empty:
                    arrived = waiting.pop(self._random.randrange(len(waiting)))
                    arrived.set()
                    continue
                if arrived is None:
                    open_ = False
                else:
                    waiting.append(arrived)
            else:
                waiting.pop(self._random.randrange(len(waiting))).set()

    @contextmanager
    def referee(self) -> Iterator[None]:
        thread = threading.Thread(target=self._referee, name="referee")
        thread.start()
        try:
            yield
        finally:
            self._arrived.put(None)
            thread.join()


@st.composite
def loops(draw: st.DrawFn) -> tuple[Loop, Mapping[str, Callable[[int], int]]]:
    """A live loop of 1-5 lanes with data, capacity and hazard edges, one or two stages, and the plan of its hazards.

    Live by construction: ops have a global order and offsets that never grow along it. Forward edges need no delay; all
    others get enough delay to reach an earlier turn.
    """
    micro = {stage: draw(st.integers(1, 3)) for stage in (0, 1)}
    keys: list[OpKey] = [(0, "X_READ")]
    for stage in (0, 1):
        keys += [(stage, op) for op in draw(st.lists(st.sampled_from(BATCH_OPS), unique=True, max_size=4))]
        if draw(st.booleans()):
            keys += [(stage, op) for op in MICRO_OPS[: draw(st.integers(1, 2))]]
    order = keys[:1] + draw(st.permutations(keys[1:]))
    forwards = [key for key in order if key[1] in MICRO_OPS]
    order = [key for key in order if key not in forwards] + sorted(forwards, key=lambda k: MICRO_OPS.index(k[1]))
    num_lanes = draw(st.integers(1, 5))
    lane_of = {key: f"lane{draw(st.integers(0, num_lanes - 1))}" for key in order}
    for stage, op in forwards:  # a stage computes in one lane
        lane_of[stage, op] = lane_of[stage, MICRO_OPS[0]]
    offsets = sorted((draw(st.sampled_from((0, 0, 0, 1, 2))) for _ in order), reverse=True)
    offset_of = dict(zip(order, offsets, strict=True))
    lanes: dict[str, list[Template]] = {}
    for stage, op in order:
        units = range(micro[stage])[:: draw(st.sampled_from((1, -1)))] if op in MICRO_OPS else range(1)
        lanes.setdefault(lane_of[stage, op], []).extend(
            Template(op=op, stage=stage, unit=unit, offset=offset_of[stage, op]) for unit in units
        )
    edges, plan = [], {}
    for place, dst in enumerate(order[1:], start=1):
        src = order[draw(st.integers(0, place - 1))]  # at least one chain back to the source
        edges.append(Edge(src=src[1], src_stage=src[0], dst=dst[1], dst_stage=dst[0]))
    for number in range(draw(st.integers(0, 5))):
        a, b = draw(st.integers(0, len(order) - 1)), draw(st.integers(0, len(order) - 1))
        least = 0 if a < b else 1 + max(0, offsets[b] - offsets[a])
        delay = least + draw(st.integers(0, 3))
        kind = draw(st.sampled_from(("data", "hazard", "capacity") if delay else ("data", "hazard")))
        ends = {"src": order[a][1], "src_stage": order[a][0], "dst": order[b][1], "dst_stage": order[b][0]}
        if kind == "hazard":
            period = draw(st.integers(1, 4))
            edges.append(Edge(**ends, delay=None, kind="hazard", hazard=f"hazard{number}"))
            # Some batches wait for a batch that is `delay` back, or further.
            plan[f"hazard{number}"] = lambda batch, p=period, d=delay: batch - d - batch % 3 if batch % p == 0 else -1
        else:
            edges.append(Edge(**ends, delay=delay, kind=kind))
    loop = Loop(
        lanes={lane: tuple(templates) for lane, templates in lanes.items()},
        edges=tuple(edges),
        source=(0, "X_READ"),
        sink=order[-1],
        stages=tuple(Stage(number=stage, micro_per_batch=count) for stage, count in micro.items()),
    )
    return loop, plan
