"""What grows with what? Planning and training, one quantity varied at a time.

    python -m benchmarks.scale.main [--curves "batch size,ranks"] [--repeats 2] [--no-training] [--out DIR]
    python -m benchmarks.scale.main --report        # the tables and the plot again from results.json

Writes results.json, tables.md and curves.svg to --out, and the summary into the README there. With --curves it
only prints, unless there is an --out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bagpipe.errors import InputError, JobError
from bagpipe.util.machine import processor_name
from benchmarks.readme import fill_in
from benchmarks.scale.planning import measure_planning
from benchmarks.scale.points import PLAN_CURVES, STEP_CURVES, Curve, Point, select
from benchmarks.scale.report import Measured, draw, from_json, markdown, median_of, summary, to_json
from benchmarks.scale.training import measure_training

__all__ = ["main"]


def main() -> int:
    """Measure, or only report."""
    options = _parse()
    folder: Path | None = options.out or (None if options.curves else Path(__file__).parent)
    try:
        if options.report:
            path = (folder or Path(__file__).parent) / "results.json"
            if not path.is_file():
                raise InputError(f"--report: {path} does not exist, measure first")
            value = json.loads(path.read_text())
            plans, steps = from_json(value)
        else:
            plans, steps = _measure(options)
            value = to_json(plans, steps, _machine())
    except InputError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    tables = markdown(plans, steps)
    print("\n" + tables)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(value, indent=1) + "\n")
        (folder / "tables.md").write_text(tables)
        if (folder / "README.md").is_file():
            fill_in(folder / "README.md", f"\n{summary(plans, steps, value['machine'])}\n")
        try:
            draw(plans, folder / "curves.svg")
        except ModuleNotFoundError as error:
            print(f"no plot: {error}", file=sys.stderr)
    return 0


def _measure(options: argparse.Namespace) -> tuple[list[Measured], list[Measured]]:
    plan_curves, step_curves = select(PLAN_CURVES, options.curves), select(STEP_CURVES, options.curves)
    if not plan_curves:
        names = ", ".join(repr(curve.name) for curve in PLAN_CURVES)
        raise InputError(f"--curves: expected parts of {names}, got {', '.join(options.curves)!r}")
    steps: list[Measured] = []
    if options.training:
        with tempfile.TemporaryDirectory(prefix="bagpipe-scale-") as folder:
            steps = _sweep(
                step_curves,
                options.repeats,
                lambda point: {"step": measure_training(point, options.steps, Path(folder))},
            )
    plans = _sweep(plan_curves, options.repeats, lambda point: {"plan": measure_planning(point, options.batches)})
    return plans, steps


def _sweep(curves: Sequence[Curve], repeats: int, measure: Callable[[Point], dict[str, object]]) -> list[Measured]:
    """Every point `repeats` times, whole sweeps one after the other; of each point the median run."""
    runs: dict[tuple[str, Point], list[Measured]] = {}
    for repeat in range(repeats):
        for curve in curves:
            for point in curve.points:
                try:
                    run = Measured(curve=curve.name, x=curve.x, point=point, **measure(point))  # type: ignore[arg-type]
                except (InputError, JobError) as error:
                    run = Measured(curve=curve.name, x=curve.x, point=point, error=str(error))
                runs.setdefault((curve.name, point), []).append(run)
                print(
                    f"{repeat + 1}/{repeats}  {curve.name}  {run.value:,}  {run.plan or run.step or run.error}",
                    flush=True,
                )
    return [median_of(group) for group in runs.values()]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--curves", type=lambda text: text.split(","), default=[], help="parts of names (default: all)")
    parser.add_argument("--batches", type=int, default=40, help="planned batches that are measured, per point")
    parser.add_argument("--steps", type=int, default=100, help="training steps, per point")
    parser.add_argument("--repeats", type=int, default=1, help="times everything is measured; the median run counts")
    parser.add_argument("--no-training", dest="training", action="store_false", help="planning only")
    parser.add_argument("--out", type=Path, help="folder of the results (default: this one; with --curves: none)")
    parser.add_argument("--report", action="store_true", help="measure nothing: write results.json up again")
    return parser.parse_args()


def _machine() -> dict[str, str]:
    return {
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
        "load average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


if __name__ == "__main__":
    sys.exit(main())
