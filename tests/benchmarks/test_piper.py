"""The reproduction of Piper's optima: its reader, its program against an exhaustive search, its rehearsal."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import run_benchmark
from benchmarks.harness.results import Results
from benchmarks.piper.inputs import Layer, PiperInput, Way, piper_input
from benchmarks.piper.main import BENCHMARK, rehearsal_text
from benchmarks.piper.search import least_time


@st.composite
def inputs(draw: st.DrawFn) -> PiperInput:
    """Up to four layers with whole numbers, some of them on two devices as well. The smaller of two ways is slower."""
    size = draw(st.integers(2, 4))
    small = st.integers(0, 9)
    edges = {pair: float(draw(small)) for pair in itertools.combinations(range(size), 2) if draw(st.booleans())}

    def layer(number: int) -> Layer:
        fast = Way(time_s=draw(small), in_flight_bytes=draw(st.integers(2, 9)), fixed_bytes=draw(small))
        slow = Way(time_s=fast.time_s + draw(small), in_flight_bytes=1.0, fixed_bytes=fast.fixed_bytes)
        return Layer(
            ways=draw(st.sampled_from([(fast,), (fast, slow)])),
            param_bytes=draw(small),
            in_sync_bytes={one: float(draw(small)) for one, other in edges if other == number},
            out_sync_bytes={other: float(draw(small)) for one, other in edges if one == number},
        )

    return PiperInput(
        layers=tuple({degree: layer(n) for degree in draw(st.sampled_from([(1,), (1, 2)]))} for n in range(size)),
        edges=edges,
        devices=draw(st.integers(1, 4)),
        memory_bytes=draw(st.sampled_from([12.0, 25.0, 50.0, 1e9])),
        bytes_per_s=2.0,
        microbatches=draw(st.sampled_from([2, 4])),
    )


def exhaustive(model: PiperInput) -> float:
    """The least time by recursion over stages, first to last placed from the end of the model, one cost at a time."""
    everything = frozenset(range(len(model.layers)))

    @cache
    def best(placed: frozenset[int], devices: int, sums: int) -> float:
        """Least time with `devices` and `sums` used by the placed layers."""
        if placed == everything:
            return 0.0
        found = math.inf
        left = everything - placed
        for size in range(1, len(left) + 1):
            for stage in map(frozenset, itertools.combinations(sorted(left), size)):
                if any(one in stage and other not in stage | placed for one, other in model.edges):
                    continue
                for degree, d in itertools.product((1, 2), range(1, model.devices + 1)):
                    used, total = devices + degree * d, sums + d
                    if used > model.devices or total > model.microbatches or model.microbatches % d:
                        continue
                    time_s = stage_s(model, stage, degree, d, total)
                    if time_s < found:
                        found = min(found, max(time_s, best(placed | stage, used, total)))
        return found

    return best(frozenset(), 0, 0)


def stage_s(model: PiperInput, stage: frozenset[int], degree: int, d: int, total: int) -> float:
    """Time of a stage, whose degree and those after it sum to `total`; the greedy exchange of ways is the paper's."""
    layers = [model.layers[n].get(degree) for n in sorted(stage)]
    if any(layer is None for layer in layers):
        return math.inf
    mine = {n: layer for n, layer in zip(sorted(stage), layers, strict=True) if layer is not None}
    in_flight = math.ceil(total / d)

    def bytes_of(way: Way) -> float:
        return way.in_flight_bytes * in_flight + way.fixed_bytes

    chosen = {n: layer.ways[0] for n, layer in mine.items()}
    swaps = sorted(
        (
            ((way.time_s - layer.ways[0].time_s) / (bytes_of(layer.ways[0]) - bytes_of(way)), n, way)
            for n, layer in mine.items()
            for way in layer.ways[1:]
            if bytes_of(way) < bytes_of(layer.ways[0])
        ),
        key=lambda swap: swap[:2],
    )
    for _, n, way in swaps:
        if sum(map(bytes_of, chosen.values())) > model.memory_bytes:
            chosen[n] = way
    if sum(map(bytes_of, chosen.values())) > model.memory_bytes:
        return math.inf
    cut = 0.0
    for (one, other), num_bytes in model.edges.items():
        if (one in stage) != (other in stage):
            sync = mine[other].in_sync_bytes[one] if other in stage else mine[one].out_sync_bytes[other]
            cut += 2 * (num_bytes + sync)
    params = sum(layer.param_bytes for layer in mine.values())
    link_s = (cut / d + 4 * (d - 1) / d * params / model.microbatches) / model.bytes_per_s
    return sum(way.time_s for way in chosen.values()) / d + link_s


@given(inputs())
def test_the_best_of_all_partitions(model: PiperInput):
    assert least_time(model).time_s == pytest.approx(exhaustive(model), rel=1e-9)


def test_the_reader():
    model = piper_input(rehearsal_text(), "x")
    assert (len(model.layers), len(model.edges), model.microbatches) == (4, 4, 8)
    assert sorted(model.layers[0]) == [1, 2]
    assert model.layers[3][2].in_sync_bytes == {1: 1e6, 2: 1e6}
    assert math.isfinite(least_time(replace(model, devices=2)).time_s)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"nodes": [{}], "edges": []}'])
def test_other_files_are_refused(text: str):
    with pytest.raises(InputError, match=r"^x: expected a model in the format of Piper"):
        piper_input(text, "x")


def test_ways_that_differ_in_more_are_refused():
    data = json.loads(rehearsal_text())
    data["nodes"][0]["TMPCs"]["1"][0]["parameterSize"] = 1
    with pytest.raises(InputError, match=r"^x: expected TMPCs of one degree with the same parameterSize"):
        piper_input(json.dumps(data), "x")


def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_benchmark(BENCHMARK, ["--rehearse", "--out", str(tmp_path)]) == 0
    ((row,),) = [part["found"] for part in Results.read(tmp_path / "results.json").parts.values()]
    assert row["time_s"] > 0
    assert "unknown" in capsys.readouterr().out
    assert run_benchmark(BENCHMARK, ["--out", str(tmp_path / "other")]) == 2
    assert "expected --inputs FOLDER" in capsys.readouterr().err
    assert run_benchmark(BENCHMARK, ["--inputs", str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "--inputs: cannot read" in capsys.readouterr().err
