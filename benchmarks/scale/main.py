"""What grows with what? Planning and training, one quantity varied at a time.

python -m benchmarks.scale.main [--curves "batch size" ranks] [--repeats 2] [--parts planning] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError, JobError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.scale.planning import measure_planning
from benchmarks.scale.points import PLAN_CURVES, STEP_CURVES, Curve, Point, select
from benchmarks.scale.report import details, draw, tables
from benchmarks.scale.training import measure_training

#: Cost that decides which run of a point is the median one.
_COSTS = ("plan_ms", "step_ms")


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    if not select(PLAN_CURVES, options.curves):
        names = ", ".join(repr(curve.name) for curve in PLAN_CURVES)
        raise InputError(f"--curves: expected parts of {names}, got {', '.join(options.curves)!r}")
    if options.curves and options.out is None and not options.rehearse:
        raise InputError("--curves leaves curves out, which would not be published any more: give --out DIR")
    known: Mapping[str, Measure] = {
        "training": partial(_train, options),
        "planning": partial(_plan, options),
    }
    return {name: known[name] for name in options.parts}


def _plan(options: argparse.Namespace, part: Part) -> None:
    curves = select(PLAN_CURVES, options.curves)
    if options.rehearse:
        curves = (_shrunk(curves[0], batch_size=256, cache_rows=5_000, lookahead=4),)
    _sweep(curves, options.repeats, lambda point: asdict(measure_planning(point, options.batches)), part)


def _train(options: argparse.Namespace, part: Part) -> None:
    curves = select(STEP_CURVES, options.curves)
    if options.rehearse:
        curves = (_shrunk(curves[0], batch_size=64, cache_rows=20_000, lookahead=4),)
    with tempfile.TemporaryDirectory(prefix="bagpipe-scale-") as folder:
        _sweep(
            curves,
            options.repeats,
            lambda point: asdict(measure_training(point, options.steps, Path(folder))),
            part,
        )


def _shrunk(curve: Curve, **sizes: int) -> Curve:
    """Two tiny points of a curve."""
    small = {name: value for name, value in sizes.items() if name != curve.x}
    points = (dataclasses.replace(curve.points[0], **small, **{curve.x: value}) for value in (128, 256))  # type: ignore[arg-type]
    return dataclasses.replace(curve, points=tuple(points))


def _sweep(curves: Sequence[Curve], repeats: int, measure: Callable[[Point], dict[str, float]], part: Part) -> None:
    """Measure every point `repeats` times, one whole sweep after the other; keep the median run of each point."""
    runs: dict[tuple[str, Point], list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for curve in curves:
            for point in curve.points:
                run: dict[str, Any] = {"curve": curve.name, "x": curve.x, "point": asdict(point)}
                try:
                    run["cost"] = measure(point)
                except (InputError, JobError) as error:
                    run["error"] = str(error)
                runs.setdefault((curve.name, point), []).append(run)
                part.keep([_median_run(group) for group in runs.values()])
                part.say(
                    f"{repeat + 1}/{repeats}  {curve.name}  {run['point'][curve.x]:,}  "
                    f"{run.get('cost') or run['error']}"
                )


def _median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run whose cost is the median (of an even number the cheaper one)."""

    def cost(run: Mapping[str, Any]) -> float:
        return next(float(run["cost"][name]) for name in _COSTS if name in run["cost"])

    good = [run for run in runs if "cost" in run]
    if not good:
        return runs[0]
    return next(run for run in good if cost(run) == statistics.median_low(map(cost, good)))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--curves", nargs="+", default=[], help="parts of names (default: all)")
    parser.add_argument("--parts", nargs="+", choices=("training", "planning"), default=["training", "planning"])
    parser.add_argument("--batches", type=int, default=40, help="planned batches that are measured, per point")
    parser.add_argument("--steps", type=int, default=100, help="training steps, per point")
    parser.add_argument("--repeats", type=int, default=1, help="sweeps; the median run of each point counts")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    details=details,
    draw=draw,
    rehearsal={"batches": 3, "steps": 5, "curves": ["batch size"]},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
