"""Projection of a planner in shards: shards, planner and port timed apart, and the first that saturates.

python -m benchmarks.scale_out.main [--batches 10] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.scale.points import Point
from benchmarks.scale_out.projection import shard_table
from benchmarks.scale_out.shards import measure_shards

#: A batch of the size of large jobs, whose rows are those of 10 billion, and the number of shards: 26 tables as in
#: Criteo's logs, 208 for more shards than that; more ranks.
_LARGE = Point(batch_size=16_384, vocabulary=10**10, lookahead=32, cache_rows=1_000_000, ranks=8)
_WIDE = dataclasses.replace(_LARGE, tables=208, batch_size=2_048)
POINTS: tuple[tuple[Point, int], ...] = (
    *((_LARGE, shards) for shards in (1, 2, 4, 8, 16, 26)),
    *((_WIDE, shards) for shards in (1, 8, 64)),
    *((dataclasses.replace(_LARGE, ranks=ranks), 8) for ranks in (1, 64, 512, 2_048)),
)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    return {"shards": partial(_measure, options)}


def _measure(options: argparse.Namespace, part: Part) -> None:
    points = POINTS
    if options.rehearse:
        points = tuple(
            (dataclasses.replace(point, batch_size=256, cache_rows=20_000, lookahead=4), shards)
            for point, shards in points[:2]
        )
    found: list[dict[str, Any]] = []
    for point, num_shards in points:
        cost = measure_shards(point, num_shards, options.batches)
        found.append({"point": asdict(point), "shards": num_shards, "cost": asdict(cost)})
        part.keep(found)
        part.say(f"{num_shards} shards, {point.tables} tables, {point.ranks} ranks  {found[-1]['cost']}")


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=10, help="planned batches that are measured, per point")


def _tables(values: Values) -> str:
    return shard_table(found_of(values, "shards") or [])


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"batches": 2},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
