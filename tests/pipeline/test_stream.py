"""Ordering of device lanes on recording streams: every dependency between lanes is a wait for the right event."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bagpipe.errors import InputError
from bagpipe.pipeline.cuda_stream import CudaStreams
from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.stream import NullStreams, keep_for_current_stream
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.program import Resource
from bagpipe.testing.recording_streams import RecordingStreams

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")


def test_device_lanes_wait_on_events_and_host_lanes_for_the_device_alone() -> None:
    streams = RecordingStreams()
    loop = prefetch_loop(prefetch_depth=2, read_ahead=2, write_depth=2)
    hazards = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}
    Runner(loop, dict.fromkeys(OPS, lambda index: None), hazards, streams=streams).run(4)
    by_lane = {lane: [(what, event) for who, what, event in streams.log if who == lane] for lane in loop.lanes}
    # Copy enqueues X_EVICT b (its event 2b) and X_INSERT b (2b + 1); compute F, B, X_UPDATE, OPT b (4b to 4b + 3). The
    # eviction of b follows the uploads of b and the update of b - 1 on the device: the copy thread itself does not
    # wait.
    assert by_lane["copy"] == [
        ("wait", "data#0"), ("record", "copy#0"), ("wait", "net-in#0"), ("record", "copy#1"),
        ("wait", "data#1"), ("wait", "compute#2"), ("record", "copy#2"), ("wait", "net-in#1"), ("record", "copy#3"),
        ("wait", "data#2"), ("wait", "net-out#0"), ("wait", "compute#6"), ("record", "copy#4"), ("wait", "net-in#2"),
        ("record", "copy#5"),
        ("wait", "data#3"), ("wait", "net-out#1"), ("wait", "compute#10"), ("record", "copy#6"), ("wait", "net-in#3"),
        ("record", "copy#7"),
        ("synchronize", ""),
    ]  # fmt: skip
    assert [entry for entry in by_lane["compute"] if entry[0] == "wait"] == [
        ("wait", "copy#1"), ("wait", "copy#3"), ("wait", "copy#5"), ("wait", "copy#7")
    ]  # fmt: skip
    # Host lanes block for the device: the store lane sends copied-out rows, and the fetch lane reuses a copied-in
    # buffer. For each other's uploads only their streams wait.
    assert [event for what, event in by_lane["net-out"] if what == "host-wait"] == [f"copy#{2 * b}" for b in range(4)]
    assert [entry for entry in by_lane["net-in"] if entry[0] != "record"] == [
        ("wait", "data#0"), ("wait", "data#1"), ("wait", "data#2"), ("host-wait", "copy#1"), ("wait", "data#3"),
        ("host-wait", "copy#3"), ("synchronize", ""),
    ]  # fmt: skip
    assert [event for what, event in by_lane["data"] if what == "host-wait"] == ["compute#3", "compute#7"]


def test_every_wait_follows_its_record() -> None:
    streams = RecordingStreams()
    loop = prefetch_loop(prefetch_depth=3, read_ahead=5, write_depth=2, microbatches=3)
    hazards = {"fetch_after": lambda b: b - 4, "evict_after": lambda b: b // 2 - 1}
    Runner(loop, dict.fromkeys(OPS, lambda index: None), hazards, streams=streams).run(300)
    recorded: set[str] = set()
    for _, what, event in streams.log:
        if what == "record":
            recorded.add(event)
        elif what != "synchronize":
            assert event in recorded


def test_a_wait_of_the_current_stream_blocks_no_thread() -> None:
    streams = RecordingStreams()
    lane, other = (streams.stream(Resource(name=name, kind="cpu")) for name in ("data", "net-in"))
    with lane.current():
        assert streams.here().key == lane.key != other.key
        event = streams.here().record()
    assert streams.here().key == "main"
    assert event is not None
    streams.here().wait(event)
    other.wait(event)  # not the lane's own event, which only uploads have: a host lane waits for it
    assert streams.log == [("data", "record", "data#0"), ("main", "wait", "data#0"), ("net-in", "host-wait", "data#0")]


def test_a_cpu_has_no_events() -> None:
    stream = NullStreams().stream(Resource(name="compute", kind="gpu"))
    with stream.current():
        assert not stream.records
        assert stream.record() is None
    stream.synchronize()


def test_memory_is_kept_where_the_device_has_streams() -> None:
    import torch

    keep_for_current_stream(torch.empty(1))  # `record_stream` of a host tensor would be an error


def test_streams_by_device_name() -> None:
    assert isinstance(open_streams("cpu"), NullStreams)
    assert isinstance(open_streams("cuda:1"), CudaStreams)
    with pytest.raises(InputError, match=r"run.device must be cpu or cuda, got 'tpu'"):
        open_streams("tpu")


def test_the_runner_needs_no_torch() -> None:
    probe = "import sys, bagpipe.pipeline.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=250, check=False).returncode == 0
