"""`python -m bagpipe sweep`: forecast a grid of jobs and clusters; print the points that no other point beats.

--replay FILE.json, --model FILE.json, --cluster FILE|NAME, lists of what is varied ──> sweep ──> table, JSON, report
                                                        --resume FILE: known points <──┘└──> new points
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bagpipe
from bagpipe.cli.progress import Progress
from bagpipe.cli.sweep_file import SweepFile, digest
from bagpipe.cli.text import aligned, write_text
from bagpipe.cluster.cluster_file import load_cluster, to_toml
from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES, Axis, Setting
from bagpipe.partition.operators import OperatorGraph
from bagpipe.util.documents import file_text
from bagpipe.util.outputs import check_writable
from bagpipe.util.packages import needed_by
from bagpipe.util.process_pool import ProcessPool, usable_cores

if TYPE_CHECKING:  # they need numpy, which other commands do without
    from bagpipe.forecast.sweep import Point

__all__ = ["add_arguments", "run"]

#: Flags that forecasts depend on, besides those of the axes, and the least value of each.
_NUMBERS = {"--dim": 1.0, "--rows": 0.0, "--weight-copies": 0.0}


#: Metavariable of a flag in the help, by the type of its values.
_METAVARS: Mapping[Any, str] = {int: "N,…", float: "X,…", str: "NAME,…"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Forecast step time, memory and price of a grid of jobs and clusters, and show the best points."
    )
    parser.add_argument(
        "--replay", required=True, metavar="FILE", help="rows of the log: what `data replay --json` wrote"
    )
    parser.add_argument(
        "--model", required=True, metavar="FILE", help="operators of the dense part, a .json file of `plan`"
    )
    parser.add_argument("--cluster", required=True, metavar="FILE|NAME", help="a .toml file, or a preset")
    parser.add_argument("--dim", type=int, default=16, metavar="N", help="weights of a row; default: 16")
    parser.add_argument("--rows", type=float, default=0.0, metavar="N", help="rows in the store at the end; 0: unknown")
    parser.add_argument(
        "--stored-rows",
        action="store_true",
        help="the store has all rows already, as in a later epoch: first uses read",
    )
    parser.add_argument(
        "--resident", action="store_true", help="also: the caches hold all --rows for good, as sharded tables do"
    )
    parser.add_argument("--weight-copies", type=float, default=3.0, metavar="X", help="as of `plan`; default: 3")
    varied = parser.add_argument_group("what is varied", "numbers with commas between; default: as the files have them")
    for axis in AXES:
        if axis.switch:
            varied.add_argument(axis.flag, action="store_true", help=axis.help)
        elif axis.flag:
            varied.add_argument(axis.flag, metavar=_METAVARS[axis.parse], help=axis.help)
    parser.add_argument("--top", type=int, default=20, metavar="N", help="lines of the table; default: 20")
    parser.add_argument("--json", metavar="FILE", help="write all points")
    parser.add_argument("--report", metavar="FILE", help="write one HTML file with charts, and what to buy next")
    parser.add_argument(
        "--resume", metavar="FILE", help="keep each point in this file once it is done, and start from those it has"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: one for each core")


def run(flags: argparse.Namespace) -> str:
    """The Pareto front as a table.

    Raises:
        InputError: a bad flag or file, or no job of the grid can run.
        JobError: an output cannot be written because the disk is full, or a process was killed.
    """
    from bagpipe.forecast.pareto import pareto_front

    _check(flags)
    write_report = _report_writer(flags) if flags.report else None
    found = _forecasts(flags)
    if flags.json:
        write_text("--json", flags.json, json.dumps([point.summary() for point in found], indent=1) + "\n")
    front = pareto_front(found)
    if not front:
        raise InputError(f"no job of the grid can run: {found[0].error}")
    if write_report is not None:
        write_report(found)
    failed = sum(point.forecast is None for point in found)
    count = f"{len(found)} points, {failed} cannot run, {len(front)} that no other beats"
    return "\n".join([*_table(front[: flags.top]), "", f"{count} in time, memory and price"]) + "\n"


def _check(flags: argparse.Namespace) -> None:
    """Raise InputError before there is a result to lose."""
    numbers = {**_NUMBERS, "--top": 1.0, **({} if flags.jobs is None else {"--jobs": 1.0})}
    for flag, least in numbers.items():
        value = _value(flags, flag)
        if not least <= value < math.inf:
            raise InputError(f"{flag}: expected at least {least:g}, got {value:g}")
    if flags.resident and flags.rows < 1:
        raise InputError("--resident: expected --rows, which the caches hold, got none")
    for flag in ("--schedules", "--microbatches"):
        if _value(flags, flag) and not flags.stages:
            raise InputError(f"{flag}: expected --stages, too")
    for flag in ("--json", "--report"):
        path = _value(flags, flag)
        if path and (flag == "--report" or not Path(path).exists() or Path(path).is_dir()):
            check_writable(path, flag)


def _forecasts(flags: argparse.Namespace) -> list[Point]:
    """All points of the grid, those of the file of ``--resume`` included."""
    from bagpipe.forecast.job import DenseCosts
    from bagpipe.forecast.sweep import Grid, grid_points, sweep
    from bagpipe.forecast.traffic import read_traffic

    cluster = load_cluster(flags.cluster)
    replay, model = file_text(flags.replay, subject="--replay"), file_text(flags.model, subject="--model")
    traffic = read_traffic(replay, source=flags.replay)
    if flags.stored_rows:
        traffic = tuple(each.with_stored_rows() for each in traffic)
    if flags.resident:
        traffic += tuple(dict.fromkeys(each.with_resident_rows(int(flags.rows)) for each in traffic))
    grid = Grid(
        traffic=traffic,
        varied={axis.name: _values(axis, _value(flags, axis.flag)) for axis in AXES if axis.flag},
    )
    graph = OperatorGraph.from_json(model, source=flags.model)
    dense = DenseCosts.of_operators(graph, flags.weight_copies)
    points = grid_points(cluster, grid, dense, dim=flags.dim, graph=graph, store_rows=flags.rows)
    inputs = {
        "bagpipe": bagpipe.__version__,
        "the replay": digest(replay),
        "the model": digest(model),
        "the cluster": digest(to_toml(cluster)),
        "--stored-rows": str(flags.stored_rows),
        "--resident": str(flags.resident),
        **{flag: f"{_value(flags, flag):g}" for flag in _NUMBERS},
        **{axis.flag: ",".join(map(str, grid.varied[axis.name])) or "not given" for axis in AXES if axis.flag},
    }
    with ExitStack() as stack:
        file = stack.enter_context(SweepFile("--resume", flags.resume, inputs)) if flags.resume else None
        known = {} if file is None else file.known
        left = sum(point.job is not None and number not in known for number, point in enumerate(points))
        pool = stack.enter_context(ProcessPool(min(flags.jobs or usable_cores(), max(1, left // _WORTH))))
        progress = stack.enter_context(Progress("sweep"))
        return sweep(
            points,
            known=known,
            each=pool.map,
            on_outcomes=(lambda outcomes: None) if file is None else file.add,
            on_points=progress.phase("forecasting"),
        )


#: Points for which a process is worth its start, which takes about half a second.
_WORTH = 500


def _report_writer(flags: argparse.Namespace) -> Callable[[Sequence[Point]], None]:
    """The function that writes the report; raises InputError before the sweep if plotly is missing."""
    with needed_by("--report", "plotly"):
        from bagpipe.forecast.report import write_report
    from bagpipe.forecast.report.view import view_of

    def write(points: Sequence[Point]) -> None:
        names = {name: Path(getattr(flags, name)).name for name in ("replay", "model")}
        write_report(Path(flags.report), view_of(points, cluster=load_cluster(flags.cluster).name, **names))

    return write


def _value(flags: argparse.Namespace, flag: str) -> Any:
    """The value of a flag by its name on the command line."""
    return getattr(flags, flag.removeprefix("--").replace("-", "_"))


def _values(axis: Axis, given: object) -> tuple[Setting, ...]:
    """The values of an axis, each once; none if its flag is not given."""
    if axis.switch:
        return axis.switch if given else ()
    if not isinstance(given, str):
        return ()
    if axis.choices:
        names = tuple(dict.fromkeys(given.split(",")))
        unknown = next((name for name in names if name not in axis.choices), None)
        if unknown is not None:
            raise InputError(f"{axis.flag}: expected {', '.join(axis.choices)} with commas between, got {unknown!r}")
        return names
    try:
        values = tuple(dict.fromkeys(map(axis.parse, given.split(","))))
    except ValueError:
        values = ()
    if not values or not all(isinstance(value, str) or 0 < value < math.inf for value in values):
        raise InputError(f"{axis.flag}: expected numbers above 0 with commas between, got {given!r}")
    return values


def _table(front: Sequence[Point]) -> Iterator[str]:
    shown = [
        axis for axis in AXES if axis.usual is None or any(point.settings[axis.name] != axis.usual for point in front)
    ]
    rows = [("step ms", "examples/s", "$ / M", "GB", *(axis.title for axis in shown), "limit")]
    for point in front:
        found = point.forecast
        assert found is not None, "points of the front can run"
        rows.append(
            (
                f"{found.step_s * 1e3:.4g}",
                f"{found.examples_per_s:,.0f}",
                f"{found.usd_per_million_examples:.3g}",
                f"{sum(found.device_bytes.values()) / 1e9:.3g}",
                *(axis.text(point.settings[axis.name]) for axis in shown),
                found.limit,
            )
        )
    yield from aligned(rows)
