from __future__ import annotations

import threading

import torch

from bagpipe.pipeline.copy_lane import CopyLane
from bagpipe.pipeline.stream import NullStreams
from bagpipe.pipeline.trace import Trace


def num_threads() -> int:
    return sum(thread.name.startswith("bagpipe-test-chunks") for thread in threading.enumerate())


def test_copies_are_made_in_order_counted_and_traced_also_while_it_is_closed() -> None:
    lane, trace = CopyLane(NullStreams(), 2, "test-chunks"), Trace()
    here, there = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    lane.order("device", 3, here, there)
    assert (num_threads(), here.sum().item()) == (0, 64)
    lane.open(trace)
    orders = [lane.order("host", 4, there, torch.full_like(here, value)) for value in (5, 6, 7)]
    lane.order("device", 5, here, None)
    for order in orders:
        order.wait(NullStreams().here())
    lane.settle()
    assert num_threads() == 1
    lane.close()
    assert (num_threads(), there.unique().tolist()) == (0, [7])
    assert (lane.num_copies, lane.num_bytes) == ({"device": 1, "host": 3}, {"device": 64, "host": 192})
    assert [(span.lane, span.name, span.category) for span in trace.spans()] == 3 * [
        ("test-chunks", "CHUNK_OUT4", "64 bytes")
    ]
    reports = lane.reports("compute")
    assert (reports["test-chunks"].num_bytes, reports["test-chunks"].actions) == (256, 4)
    assert reports["compute"].wait_s == -reports["compute"].busy_s
