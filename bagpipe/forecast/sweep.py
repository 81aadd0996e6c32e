"""`sweep`: forecasts of a grid of jobs and clusters.

replay settings x values of axes ──grid_points──> Points ──chunks──> forecast_chunk ──> Points with forecasts
                                                                      └── here, or in processes: results are equal
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES, Axis, Case, Setting, settings_of
from bagpipe.forecast.forecast import Forecast, forecast_all, loop_kind
from bagpipe.forecast.job import DenseCosts, JobShape
from bagpipe.forecast.stages import StagedDense, staged_dense
from bagpipe.forecast.traffic import RowTraffic, UniqueCurve, unique_curve
from bagpipe.partition.operators import OperatorGraph

__all__ = ["Chunk", "Grid", "Outcome", "Point", "chunks", "forecast_chunk", "grid_points", "sweep"]

#: Points that are simulated together: enough for the simulator, few enough for a progress bar and for processes.
_AT_ONCE = 500

#: What became of a point: its forecast, or why there is none.
Outcome: TypeAlias = Forecast | str
#: Clusters and jobs that are forecast together.
Chunk: TypeAlias = Sequence[tuple[ClusterModel, JobShape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is varied.

    Attributes:
        traffic: settings of a replay: batch size, cache, window and policy.
        varied: name of an axis -> its values; others are as the replay and the cluster have them. A setting that was
            counted for other ranks is used with as many slots in all.
    """

    traffic: tuple[RowTraffic, ...]
    varied: Mapping[str, Sequence[Setting]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination, and its forecast once it is made.

    Attributes:
        settings: name of an axis -> value, for every axis.
        cluster: with the point's servers, cachers and ports.
        job: None: there is no such job.
        forecast: None: not made yet, or the job cannot run there.
        error: why not.
    """

    settings: Mapping[str, Setting]
    cluster: ClusterModel
    job: JobShape | None
    forecast: Forecast | None = None
    error: str = ""

    def summary(self) -> dict[str, Any]:
        """The point for JSON."""
        found = self.forecast
        return {
            **self.settings,
            "error": self.error or None,
            "step_s": None if found is None else found.step_s,
            "examples_per_s": None if found is None else found.examples_per_s,
            "usd_per_million_examples": None if found is None else found.usd_per_million_examples,
            "device_bytes": None if found is None else dict(found.device_bytes),
            "limit": None if found is None else found.limit,
            "op_s": None if found is None else dict(found.op_s),
            "shares": None if found is None else dict(found.shares),
            "busy": None if found is None else dict(found.busy),
        }


def grid_points(
    cluster: ClusterModel,
    grid: Grid,
    dense: DenseCosts,
    *,
    dim: int,
    graph: OperatorGraph | None = None,
    store_rows: float = 0.0,
) -> list[Point]:
    """Every combination once, without forecasts. A job that is none, such as one with too many ranks, says why.

    Args:
        cluster: what is varied of it starts from it.
        grid: what is varied.
        dense: the dense part as one stage.
        dim: weights of a row.
        graph: its operators, if stages are varied.
        store_rows: as of `JobShape`.

    Raises:
        InputError: the cluster has no stores or cachers whose number could be varied.
    """
    jobs = _Jobs(dense=dense, graph=graph, uniques=unique_curve(grid.traffic), dim=dim, store_rows=store_rows)
    first = Case(cluster=cluster, traffic=grid.traffic[0], ranks=grid.traffic[0].ranks)
    of_job = [axis for axis in AXES if not axis.of_cluster]
    found: dict[tuple[Setting, ...], Point] = {}
    for outer in _varied(first, grid, [axis for axis in AXES if axis.of_cluster]):
        for traffic in grid.traffic:
            for case in _varied(replace(outer, traffic=traffic, ranks=traffic.ranks), grid, of_job):
                settings = settings_of(case)  # of one stage, schedules and micro-batches are alike
                key = tuple(settings.values())
                if key not in found:
                    found[key] = _point(case, settings, jobs)
    return list(found.values())


def _varied(case: Case, grid: Grid, axes: Sequence[Axis]) -> Iterator[Case]:
    """The case with each combination of values of these axes, the last axis fastest."""
    varied = [(axis.vary, grid.varied[axis.name]) for axis in axes if axis.vary and grid.varied.get(axis.name)]
    for values in itertools.product(*(values for _, values in varied)):
        changed = case
        for (vary, _), value in zip(varied, values, strict=True):
            changed = vary(changed, value)
        yield changed


def _point(case: Case, settings: Mapping[str, Setting], jobs: _Jobs) -> Point:
    try:
        job = jobs.of(case)
    except InputError as error:
        return Point(settings=settings, cluster=case.cluster, job=None, error=str(error))
    return Point(settings=settings, cluster=case.cluster, job=job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
    """Makes the jobs of a grid. Pipelines of the same stages are simulated once."""

    dense: DenseCosts
    graph: OperatorGraph | None
    uniques: UniqueCurve
    dim: int
    store_rows: float
    pipelines: dict[tuple[Setting, ...], StagedDense | InputError] = field(default_factory=dict)

    def of(self, case: Case) -> JobShape:
        """The job of a case.

        Raises:
            InputError: there is none.
        """
        return JobShape(
            ranks=case.ranks,
            batch_examples=case.traffic.batch_examples,
            traffic=case.traffic.on_ranks(case.ranks),
            uniques=self.uniques,
            dim=self.dim,
            dense=self.dense,
            staged=self._pipeline(case) if case.stages > 1 else None,
            shard=case.shard,
            checkpoint_every=case.checkpoint_every,
            direct=case.direct,
            store_rows=self.store_rows,
        )

    def _pipeline(self, case: Case) -> StagedDense:
        assert self.graph is not None, "stages are varied"
        # Store servers and cachers are no part of the pipeline.
        key = (case.bandwidth, case.ranks, case.traffic.batch_examples, case.stages, case.schedule, case.microbatches)
        if key not in self.pipelines:
            try:
                self.pipelines[key] = staged_dense(
                    self.graph,
                    case.cluster,
                    ranks=case.ranks,
                    batch_examples=case.traffic.batch_examples,
                    stages=case.stages,
                    microbatches=case.microbatches,
                    schedule=case.schedule,
                    weight_copies=self.dense.weight_copies,
                )
            except InputError as error:
                self.pipelines[key] = error
        found = self.pipelines[key]
        if isinstance(found, InputError):
            raise found
        return found


def sweep(
    points: Sequence[Point],
    *,
    known: Mapping[int, Outcome] | None = None,
    each: Callable[[Callable[[Chunk], list[Outcome]], Iterable[Chunk]], Iterator[list[Outcome]]] = map,
    on_outcomes: Callable[[Mapping[int, Outcome]], None] = lambda outcomes: None,
    on_points: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """Forecast all points of a grid. The result depends on the points alone.

    Args:
        points: of `grid_points`.
        known: number of a point -> what an earlier call found out.
        each: applies a function to chunks, in order, as `map` does; for processes.
        on_outcomes: called with what is new: number of a point -> what became of it.
        on_points: called after it, with the numbers of points that are done and of all.
    """
    found = dict(known or {})
    left = [number for number, point in enumerate(points) if point.job is not None and number not in found]
    total = len(found) + len(left)
    parts = chunks(points, left)
    for numbers, outcomes in zip(parts, each(forecast_chunk, _work(points, parts)), strict=True):
        new = dict(zip(numbers, outcomes, strict=True))
        found |= new
        on_outcomes(new)
        on_points(len(found), total)
    return [_with(point, found.get(number, point.error)) for number, point in enumerate(points)]


def chunks(points: Sequence[Point], numbers: Iterable[int]) -> list[list[int]]:
    """The numbers of points with jobs, divided so that points with one kind of loop are simulated together."""

    def kind(number: int) -> str:
        job = points[number].job
        assert job is not None, "points without a job are not forecast"
        return repr(loop_kind(job))

    ordered = sorted(numbers, key=kind)
    return [ordered[first : first + _AT_ONCE] for first in range(0, len(ordered), _AT_ONCE)]


def forecast_chunk(chunk: Chunk) -> list[Outcome]:
    """What becomes of each job. Runs in a process of its own too."""
    return [each if isinstance(each, Forecast) else str(each) for each in forecast_all(chunk)]


def _work(points: Sequence[Point], parts: Iterable[Sequence[int]]) -> Iterator[Chunk]:
    for numbers in parts:
        yield [(point.cluster, point.job) for point in (points[n] for n in numbers) if point.job is not None]


def _with(point: Point, outcome: Outcome) -> Point:
    if isinstance(outcome, str):
        return replace(point, forecast=None, error=outcome)
    return replace(point, forecast=outcome, error="")
