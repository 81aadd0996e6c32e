"""Device order of a loop: for every dependency, the event log of a real run holds a chain of waits.

log of a real run ─> clocks of every lane's stream and thread ─> does an action's stream know all its requirements?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest

from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.testing.recording_streams import RecordingStreams

NUM_BATCHES = 12

HAZARDS: Mapping[str, Callable[[int], int]] = {
    "fetch_after": lambda b: b - 3,
    "evict_after": lambda b: b - 1 if b % 3 else b // 2 - 1,
    "ready_after": lambda b: b - 1 if b % 2 else b // 2 - 1,
}


def _staged(ranks: int) -> Loop:
    step = step_program(chain(2, 4), [(0, True), (1, False)], "1f1b", num_processes=2 if ranks > 1 else 1)
    return prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, ranks=ranks, step=step)


loop_of = partial(prefetch_loop, prefetch_depth=2, read_ahead=3, write_depth=2)

LOOPS: Mapping[str, Callable[[], Loop]] = {
    "training": loop_of,
    "training in micro-batches": lambda: loop_of(microbatches=2),
    "evaluation": lambda: loop_of(train=False),
    "training of ranks": lambda: loop_of(ranks=2),
    "training of ranks that skip": lambda: loop_of(ranks=2, skips=True),
    "evaluation of ranks": lambda: loop_of(ranks=2, train=False),
    "stages": lambda: _staged(1),
    "stages of a process": lambda: _staged(2),
}


def _log_of(loop: Loop) -> list[tuple[str, str, str]]:
    streams = RecordingStreams()
    handlers = {template.text: _nothing for _, template in loop.templates}
    Runner(loop, handlers, _hazards(loop), streams=streams).run(NUM_BATCHES)
    return streams.log


def _hazards(loop: Loop) -> Mapping[str, Callable[[int], int]]:
    return {edge.hazard: HAZARDS[edge.hazard] for edge in loop.edges if edge.hazard}


def _nothing(index: int) -> None:
    pass


class _Known:
    """Lane -> number of its actions known to be done."""

    def __init__(self, log: list[tuple[str, str, str]]) -> None:
        self.streams: dict[str, Counter[str]] = defaultdict(Counter)
        self.threads: dict[str, Counter[str]] = defaultdict(Counter)
        #: (lane, number of its action) -> knowledge of its stream and its thread when the action was enqueued.
        self.at: dict[tuple[str, int], tuple[Counter[str], Counter[str]]] = {}
        events: dict[str, Counter[str]] = {}
        for lane, what, event in log:
            stream, thread = self.streams[lane], self.threads[lane]
            if what == "record":
                number = stream[lane]
                self.at[lane, number] = Counter(stream), Counter(thread)
                stream[lane] = number + 1
                events[event] = Counter(stream)
            elif what in ("wait", "host-wait"):
                stream |= events[event]
                if what == "host-wait":
                    thread |= events[event]
            self.streams[lane], self.threads[lane] = stream, thread


def _missing(loop: Loop, log: list[tuple[str, str, str]]) -> Iterator[str]:
    """Dependencies between lanes that no wait in the log enforces."""
    graph = Graph(loop.unroll(NUM_BATCHES), _hazards(loop))
    number: dict[int, int] = {}
    seen: Counter[str] = Counter()
    for node, lane in enumerate(graph.lane_of):
        number[node] = seen[lane]
        seen[lane] += 1
    known = _Known(log).at
    for node, lane in enumerate(graph.lane_of):
        stream, thread = known[lane, number[node]]
        for predecessor in graph.predecessors[node]:
            source = graph.lane_of[predecessor.node]
            if source == lane:
                continue
            holds_threads = loop.resource(source).on_device and not loop.resource(lane).on_device
            if (thread if holds_threads else stream)[source] <= number[predecessor.node]:
                yield f"{graph.actions[node].text} of {lane} may run before {graph.actions[predecessor.node].text}"


@pytest.mark.parametrize("name", LOOPS)
def test_every_dependency_between_lanes_is_waited_for(name: str) -> None:
    loop = LOOPS[name]()
    assert list(_missing(loop, _log_of(loop))) == []


@pytest.mark.parametrize("name", LOOPS)
def test_missing_waits_are_detected(name: str) -> None:
    """The control: without the waits for any one device lane, some dependencies are not enforced."""
    loop = LOOPS[name]()
    log = _log_of(loop)
    sources = {event.partition("#")[0] for _, what, event in log if what in ("wait", "host-wait")}
    for source in sources:
        if loop.resource(source).on_device:
            without = [entry for entry in log if not (entry[1].endswith("wait") and entry[2].startswith(f"{source}#"))]
            assert list(_missing(loop, without)), source
