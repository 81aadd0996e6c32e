"""`python -m bagpipe sweep`: forecast a grid of jobs and clusters; print the points that no other point beats.

--replay FILE.json, --model FILE.json, --cluster FILE|NAME, lists of what is varied ──> sweep ──> table, JSON
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from bagpipe.cli.progress import Progress
from bagpipe.cli.text import aligned, read_text, write_text
from bagpipe.cluster.cluster_file import load_cluster
from bagpipe.errors import InputError
from bagpipe.partition.operators import OperatorGraph

if TYPE_CHECKING:  # it needs numpy, which other commands do without
    from bagpipe.forecast.sweep import Point

__all__ = ["add_arguments", "run"]

_Number = TypeVar("_Number", int, float)

_COLUMNS = ("step ms", "examples/s", "$ / M", "GB", "batch", "ranks", "cache", "window", "servers", "cachers", "limit")


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
    parser.add_argument("--weight-copies", type=float, default=3.0, metavar="X", help="as of `plan`; default: 3")
    varied = parser.add_argument_group("what is varied", "numbers with commas between; default: as the files have them")
    varied.add_argument("--ranks", metavar="N,…", help="ranks, one device each")
    varied.add_argument("--servers", metavar="N,…", help="store servers")
    varied.add_argument("--cachers", metavar="N,…", help="cacher hosts")
    varied.add_argument("--bandwidths", metavar="X,…", help="factors of every port's bandwidth")
    varied.add_argument("--direct", action="store_true", help="without a cache, too")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="lines of the table; default: 20")
    parser.add_argument("--json", metavar="FILE", help="write all points")


def run(flags: argparse.Namespace) -> str:
    """The Pareto front as a table.

    Raises:
        InputError: a bad flag or file, or no job of the grid can run.
    """
    from bagpipe.forecast.job import DenseCosts
    from bagpipe.forecast.sweep import Grid, grid_points, pareto_front, sweep
    from bagpipe.forecast.traffic import read_traffic

    cluster = load_cluster(flags.cluster)
    grid = Grid(
        traffic=read_traffic(read_text("--replay", flags.replay), source=flags.replay),
        ranks=_numbers("--ranks", flags.ranks, int),
        servers=_numbers("--servers", flags.servers, int),
        cachers=_numbers("--cachers", flags.cachers, int),
        bandwidths=_numbers("--bandwidths", flags.bandwidths, float) or (1.0,),
        direct=flags.direct,
    )
    graph = OperatorGraph.from_json(read_text("--model", flags.model), source=flags.model)
    dense = DenseCosts.of_operators(graph, flags.weight_copies)
    for name, least in (("dim", 1), ("top", 1), ("rows", 0), ("weight_copies", 0)):
        value = getattr(flags, name)
        if not least <= value < math.inf:
            raise InputError(f"--{name.replace('_', '-')}: expected at least {least}, got {value:g}")
    points = list(grid_points(cluster, grid, dense, dim=flags.dim, store_rows=flags.rows))
    with Progress("sweep") as progress:
        found = sweep(points, on_points=progress.phase("forecasting"))
    if flags.json:
        write_text("--json", flags.json, json.dumps([point.summary() for point in found], indent=1) + "\n")
    front = pareto_front(found)
    if not front:
        raise InputError(
            f"no job of the grid can run: {next((point.error for point in found), 'ranks exceed the examples')}"
        )
    lines = [*_table(front[: flags.top])]
    failed = sum(point.forecast is None for point in found)
    count = f"{len(found)} points, {failed} cannot run, {len(front)} that no other beats"
    lines += ["", f"{count} in time, memory and price"]
    return "\n".join(lines) + "\n"


def _numbers(flag: str, text: str | None, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    if text is None:
        return ()
    try:
        values = tuple(map(kind, text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(f"{flag}: expected numbers above 0 with commas between, got {text!r}")
    return values


def _table(front: Sequence[Point]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for point in front:
        found = point.forecast
        assert found is not None, "points of the front can run"
        rows.append(
            (
                f"{found.step_s * 1e3:.4g}",
                f"{found.examples_per_s:,.0f}",
                f"{found.usd_per_million_examples:.3g}",
                f"{sum(found.device_bytes.values()) / 1e9:.3g}",
                str(point.batch_examples),
                str(point.ranks),
                "direct" if point.policy == "direct" else str(point.cache_rows),
                str(point.lookahead),
                str(point.servers) + (f" x {point.bandwidth:g}" if point.bandwidth != 1 else ""),
                str(point.cachers),
                found.limit,
            )
        )
    yield from aligned(rows)
