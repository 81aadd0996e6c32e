"""CUDA streams on a device. Without one, the race detector's modelled device runs them."""

from __future__ import annotations

import time

import pytest
import torch

from bagpipe.pipeline.cuda_stream import CudaStreams
from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.program import Resource

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")

GPU = Resource(name="compute", kind="gpu")
HOST = Resource(name="data", kind="cpu")


def test_a_pipeline_on_cuda_streams_computes_in_order() -> None:
    loop = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2)
    slots = torch.zeros(1 << 20, device="cuda")
    staged: dict[int, torch.Tensor] = {}
    stored: list[float] = []

    def get(batch: int) -> None:
        staged[batch] = torch.full((1 << 20,), float(batch), pin_memory=True)

    def put(batch: int) -> None:
        slots.copy_(staged[batch], non_blocking=True)

    out: dict[int, torch.Tensor] = {}

    def evict(batch: int) -> None:
        out[batch] = torch.empty(1 << 20, pin_memory=True)
        out[batch].copy_(slots, non_blocking=True)

    def update(batch: int) -> None:
        slots.add_(1.0)

    def store(batch: int) -> None:
        stored.append(float(out.pop(batch).max()))

    handlers = {
        **dict.fromkeys(OPS, lambda index: None),
        "X_FETCH": get, "X_INSERT": put, "X_EVICT": evict, "X_UPDATE": update, "X_WRITEBACK": store,
    }  # fmt: skip
    hazards = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}
    Runner(loop, handlers, hazards, streams=open_streams("cuda")).run(100)
    assert stored == [0.0, *(float(batch) + 1.0 for batch in range(99))]


def test_a_host_lane_waits_for_the_device_and_not_for_uploads() -> None:
    streams = CudaStreams("cuda")
    device, uploads, host = streams.stream(GPU), streams.stream(HOST), streams.stream(HOST)
    with uploads.current():
        torch.cuda._sleep(1_000_000_000)  # at least half a second
        uploaded = uploads.record()
    with device.current():
        torch.cuda._sleep(10_000_000)
        computed = device.record()
    assert uploaded is not None
    assert computed is not None
    host.wait(uploaded)
    assert not uploaded.query()
    host.wait(computed)
    assert computed.query()
    followed = host.record()  # its own later work follows the uploads, whichever lane waits
    assert followed is not None
    device.wait(followed)
    device.synchronize()
    assert uploaded.query()


def test_marks_know_their_time_on_the_traces_clock() -> None:
    streams = CudaStreams("cuda")
    trace, loop = Trace(), prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2)
    work = torch.randn(2048, 2048, device="cuda")

    def forward(batch: int) -> None:
        work @ work

    handlers = {**dict.fromkeys(OPS, lambda index: None), "F": forward}
    hazards = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}
    start_ns = time.monotonic_ns()
    Runner(loop, handlers, hazards, streams=streams, trace=trace).run(20)
    end_ns = time.monotonic_ns()
    spans = [span for span in trace.spans() if span.lane == "compute (device)" and span.name.startswith("0F")]
    assert [span.name for span in spans] == [f"0F{b}" for b in range(20)]
    for span in spans:
        assert start_ns - 1_000_000 < span.start_ns <= span.end_ns < end_ns + 1_000_000
