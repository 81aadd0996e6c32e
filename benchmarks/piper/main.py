"""Does our program over downsets find the optima that Piper's published program finds on its published inputs?

    python -m benchmarks.piper.main --inputs FOLDER [--models bert32a100 gnmt resnet] [--most-devices 128] [--out DIR]

FOLDER has bert32a100.json, gnmt.json and resnet.json, from the folder inputs of github.com/msr-fiddle/piper.
The published optima below were found by compiling and running its algo.cpp with the settings of its experiments.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table
from benchmarks.harness.rounds import timed
from benchmarks.piper.inputs import PiperInput, piper_input
from benchmarks.piper.search import least_time

GIB = 2**30

#: Of a device's link in the experiments.
BYTES_PER_S = 25 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An experiment: devices, memory of each, and the published program's seconds per micro-batch; None: unknown."""

    devices: int
    memory_gib: float
    published_s: float | None = None


def _case(devices: int, memory_gib: float, published_s: float) -> Case:
    return Case(devices=devices, memory_gib=memory_gib, published_s=published_s)


CASES: Mapping[str, tuple[Case, ...]] = {
    "bert32a100": (
        _case(8, 1, math.inf),
        _case(8, 8, 0.16585575),
        _case(8, 80, 0.12200726934987305),
        _case(32, 2, 0.066549500),
        _case(32, 8, 0.041515450441718109),
        _case(32, 80, 0.030844048208788031),
        _case(64, 2, 0.032030081234931951),
        _case(64, 8, 0.020200550294478738),
        _case(128, 1, 0.03887175),
        _case(128, 2, 0.01514640785630544),
        _case(128, 8, 0.01012088032392661),
        _case(128, 80, 0.0080532429235167791),
    ),
    "gnmt": (
        _case(2, 2.5, 263.35428906249996),
        _case(2, 3.5, 260.22682330580062),
    ),
    "resnet": (
        _case(8, 4, 73.493286000131647),
        _case(8, 8, 63.433536604835204),
        _case(8, 16, 58.557709976251054),
        _case(16, 1.5, math.inf),
        _case(16, 2, 76.521312500000008),
        _case(16, 4, 35.333437509089713),
        _case(32, 1.5, 50.977195312500015),
        _case(32, 2, 24.625898521721371),
        _case(32, 8, 15.758026065495278),
        _case(64, 1.5, 16.992140625),
        _case(64, 4, 8.6667728484878115),
        _case(128, 1, 19.85632855101333),
    ),
}

#: Of a rehearsal: two branches of one layer each between two others, made up.
REHEARSED = Case(devices=4, memory_gib=1.0)


def rehearsal_text() -> str:
    """A small model in the format of Piper's inputs."""
    pairs = ((0, 1), (0, 2), (1, 3), (2, 3))

    def way(number: int, name: str, degree: int) -> dict[str, Any]:
        is_small = name == "small"
        return {
            "id": name,
            "timePerSample": (1.3 if is_small else 1.0) * (1 + number) / degree,
            "parameterSize": 4e6 / degree,
            "memoryUsageA": (1e7 if is_small else 2e8) / degree,
            "memoryUsageB": 2e8 / degree,
            "syncTimeFw": {str(one): 1e6 * (degree - 1) for one, other in pairs if other == number},
            "syncTimeBw": {str(other): 1e6 * (degree - 1) for one, other in pairs if one == number},
        }

    return json.dumps(
        {
            "maxMemoryPerDevice": 1e9,
            "maxDevices": 4,
            "bandwidth": 1e9,
            "mbsInBatch": 8,
            "nodes": [
                {
                    "id": number,
                    "TMPCs": {
                        str(degree): [way(number, name, degree) for name in ("fast", "small")] for degree in (1, 2)
                    },
                }
                for number in range(4)
            ],
            "edges": [{"sourceId": one, "destId": other, "communicationCost": 1e6} for one, other in pairs],
        }
    )


def measure(model: PiperInput, case: Case) -> dict[str, Any]:
    """Our optimum, its ratio to the published one, and the processor time of the search."""
    changed = replace(model, devices=case.devices, memory_bytes=case.memory_gib * GIB, bytes_per_s=float(BYTES_PER_S))
    search_s, found = timed(lambda: least_time(changed), clock=time.process_time)
    fits = math.isfinite(found.time_s)
    published_fits = case.published_s is not None and math.isfinite(case.published_s)
    return {
        "devices": case.devices,
        "memory_gib": case.memory_gib,
        "downsets": found.downsets,
        "time_s": found.time_s if fits else None,
        "published_s": case.published_s if published_fits else None,
        "ratio": found.time_s / case.published_s if fits and published_fits and case.published_s else None,
        "agrees": None if case.published_s is None else _agrees(found.time_s, case.published_s),
        "search_s": round(search_s, 2),
    }


def _agrees(own_s: float, published_s: float) -> bool:
    """Whether both are equal, to the 1e-9 s within which the published program compares; or nothing fits for both."""
    return own_s == published_s or math.isclose(own_s, published_s, rel_tol=1e-9, abs_tol=2e-9)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    if options.rehearse:
        return {"rehearsal": lambda part: part.add(measure(piper_input(rehearsal_text(), "rehearsal"), REHEARSED))}
    if options.inputs is None:
        raise InputError("expected --inputs FOLDER with the inputs of Piper, got none")
    models = {name: _read(options.inputs / f"{name}.json") for name in options.models}

    def part_of(name: str) -> Measure:
        def search(part: Part) -> None:
            for case in CASES[name]:
                if case.devices <= options.most_devices:
                    row = measure(models[name], case)
                    part.add(row)
                    part.say(f"{name}, {case.devices} devices of {case.memory_gib} GiB: {row['time_s']}")

        return search

    return {name: part_of(name) for name in models}


def _read(path: Path) -> PiperInput:
    try:
        return piper_input(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise InputError(f"--inputs: cannot read {path}: {error.strerror}") from None


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", type=Path, metavar="FOLDER", help="with the .json files of Piper")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--most-devices", type=int, default=128)


def _tables(values: Values) -> str:
    headers = ("model", "devices", "GiB", "downsets", "ours s", "published s", "ours / published", "search s")
    return table(headers, [_row(name, row) for name in values["parts"] for row in found_of(values, name) or ()])


def _row(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    def seconds(value: float | None) -> str:
        return "does not fit" if value is None else f"{value:.9g}"

    published = "unknown" if row["agrees"] is None else seconds(row["published_s"])
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.9f}"
    settings = (name, row["devices"], row["memory_gib"], row["downsets"])
    return (*settings, seconds(row["time_s"]), published, ratio, f"{row['search_s']:.1f}")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
