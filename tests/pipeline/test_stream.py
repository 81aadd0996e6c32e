"""Ordering of device lanes, on a recording fake: every dependency between lanes is a wait for the right event."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bagpipe.errors import InputError
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.stream import CudaStreams, NullStreams, RecordingStreams, open_streams
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.program import Resource

OPS = ("X_READ", "X_GET", "X_EVICT", "X_PUT", "F", "B", "X_UPDATE", "OPT", "X_STORE")


def test_device_lanes_wait_on_events_and_host_lanes_synchronise() -> None:
    streams = RecordingStreams()
    loop = prefetch(prefetch_depth=2, read_ahead=2, write_depth=2)
    hazards = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}
    Runner(loop, dict.fromkeys(OPS, lambda index: None), hazards, streams=streams).run(4)
    by_lane = {lane: [(what, event) for who, what, event in streams.log if who == lane] for lane in loop.lanes}
    # Copy enqueues X_EVICT b (its event 2b) and X_PUT b (2b + 1); compute F, B, X_UPDATE, OPT b (4b to 4b + 3).
    # The eviction of b follows the update of b - 1, on the device: the copy thread itself does not wait.
    assert by_lane["copy"] == [
        ("record", "copy#0"), ("record", "copy#1"),
        ("wait", "compute#2"), ("record", "copy#2"), ("record", "copy#3"),
        ("wait", "compute#6"), ("record", "copy#4"), ("record", "copy#5"),
        ("wait", "compute#10"), ("record", "copy#6"), ("record", "copy#7"),
        ("synchronize", ""),
    ]  # fmt: skip
    assert [entry for entry in by_lane["compute"] if entry[0] == "wait"] == [
        ("wait", "copy#1"), ("wait", "copy#3"), ("wait", "copy#5"), ("wait", "copy#7")
    ]  # fmt: skip
    # Host lanes block: the store sends what was copied out, the fetch reuses a buffer that was copied in.
    assert by_lane["net-out"] == [
        *(("host-wait", f"copy#{2 * b}") for b in range(4)), ("synchronize", "")
    ]  # fmt: skip
    assert by_lane["net-in"] == [("host-wait", "copy#1"), ("host-wait", "copy#3"), ("synchronize", "")]
    assert by_lane["data"] == [("host-wait", "compute#3"), ("host-wait", "compute#7"), ("synchronize", "")]


def test_every_wait_follows_its_record() -> None:
    streams = RecordingStreams()
    loop = prefetch(prefetch_depth=3, read_ahead=5, write_depth=2, microbatches=3)
    hazards = {"fetch_after": lambda b: b - 4, "evict_after": lambda b: b // 2 - 1}
    Runner(loop, dict.fromkeys(OPS, lambda index: None), hazards, streams=streams).run(300)
    recorded: set[str] = set()
    for _, what, event in streams.log:
        if what == "record":
            recorded.add(event)
        elif what != "synchronize":
            assert event in recorded


def test_a_cpu_has_no_events() -> None:
    stream = NullStreams().stream(Resource(name="compute", kind="gpu"))
    with stream.current():
        assert not stream.records
        assert stream.record() is None
    stream.synchronize()


def test_streams_by_device_name() -> None:
    assert isinstance(open_streams("cpu"), NullStreams)
    assert isinstance(open_streams("cuda:1"), CudaStreams)
    with pytest.raises(InputError, match=r"run.device must be cpu or cuda, got 'tpu'"):
        open_streams("tpu")


def test_the_runner_needs_no_torch() -> None:
    probe = "import sys, bagpipe.pipeline.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60, check=False).returncode == 0


@pytest.mark.gpu
def test_a_pipeline_on_cuda_streams_computes_in_order() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    loop = prefetch(prefetch_depth=2, read_ahead=4, write_depth=2)
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
        "X_GET": get, "X_PUT": put, "X_EVICT": evict, "X_UPDATE": update, "X_STORE": store,
    }  # fmt: skip
    hazards = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}
    Runner(loop, handlers, hazards, streams=open_streams("cuda")).run(100)
    assert stored == [0.0, *(float(batch) + 1.0 for batch in range(99))]
