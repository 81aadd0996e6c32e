"""`PiperInput`: a model in the public JSON format of Piper (Tarnawski et al., NeurIPS 2021), as records.

    {"nodes": [{"id", "TMPCs": {degree: [way, …]}}], "edges": [{"sourceId", "destId", "communicationCost"}], …}
                                                                              ──piper_input──> PiperInput

A layer has *ways* for each degree of tensor parallelism: how long it takes and what it keeps. The ways of one degree
may differ in these only, as storing and recomputing activations do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json

__all__ = ["Layer", "PiperInput", "Way", "piper_input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compute a layer.

    Attributes:
        time_s: seconds per micro-batch, forward and backward.
        in_flight_bytes: kept of each micro-batch in flight, on each device.
        fixed_bytes: kept besides, on each device.
    """

    time_s: float
    in_flight_bytes: float
    fixed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer on one degree of tensor parallelism.

    Attributes:
        ways: at least one.
        param_bytes: that data-parallel replicas synchronise, on each device.
        in_sync_bytes, out_sync_bytes: neighbour -> bytes more than the edge's, where the edge leaves the stage.
    """

    ways: tuple[Way, ...]
    param_bytes: float
    in_sync_bytes: Mapping[int, float]
    out_sync_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperInput:
    """A model and what it runs on.

    Attributes:
        layers: per node, by degree of tensor parallelism. Nodes are numbered from 0 in the order of the file.
        edges: (producer, consumer) -> bytes of a micro-batch.
        devices: at most so many.
        memory_bytes: of a device.
        bytes_per_s: of a device's link.
        microbatches: per batch.
    """

    layers: tuple[Mapping[int, Layer], ...]
    edges: Mapping[tuple[int, int], float]
    devices: int
    memory_bytes: float
    bytes_per_s: float
    microbatches: int


def piper_input(text: str, source: str) -> PiperInput:
    """The model of a file.

    Args:
        text: JSON.
        source: name of the file, for messages.

    Raises:
        InputError: another format, or ways of one degree that differ in more than time and memory.
    """
    try:
        data = parse_json(text)
        number = {node["id"]: place for place, node in enumerate(data["nodes"])}
        return PiperInput(
            layers=tuple(
                {int(degree): _layer(ways, number) for degree, ways in node["TMPCs"].items() if ways}
                for node in data["nodes"]
            ),
            edges={
                (number[edge["sourceId"]], number[edge["destId"]]): float(edge["communicationCost"])
                for edge in data["edges"]
            },
            devices=int(data["maxDevices"]),
            memory_bytes=float(data["maxMemoryPerDevice"]),
            bytes_per_s=float(data["bandwidth"]),
            microbatches=int(data["mbsInBatch"]),
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: expected a model in the format of Piper ({error!r})") from None


def _layer(ways: list[dict[str, Any]], number: Mapping[int, int]) -> Layer:
    shared = [{key: way[key] for key in ("parameterSize", "syncTimeFw", "syncTimeBw")} for way in ways]
    if any(each != shared[0] for each in shared):
        raise InputError("expected TMPCs of one degree with the same parameterSize and syncTime, got different ones")
    return Layer(
        ways=tuple(
            Way(
                time_s=float(way["timePerSample"]),
                in_flight_bytes=float(way["memoryUsageA"]),
                fixed_bytes=float(way["memoryUsageB"]),
            )
            for way in ways
        ),
        param_bytes=float(shared[0]["parameterSize"]),
        in_sync_bytes={number[int(other)]: float(value) for other, value in shared[0]["syncTimeFw"].items()},
        out_sync_bytes={number[int(other)]: float(value) for other, value in shared[0]["syncTimeBw"].items()},
    )
