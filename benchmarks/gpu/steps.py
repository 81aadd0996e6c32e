"""Part `steps`: a DLRM step with all rows in device memory, and cached, over process memory and over servers.

resident ─ cached over each store ─ resident again      baseline of a cached run: the fastest of the residents

A missing dependency costs only its own lines of the table. A run of ours that fails raises `Failure` at the end.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagpipe.embedding.plain_bags import CachedBags
from bagpipe.errors import InputError
from bagpipe.oracle.rank_batch import RankBatch
from benchmarks.gpu.cached import run_cached, store_makers
from benchmarks.gpu.resident import RESIDENTS, step_times
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import median_s
from benchmarks.gpu.workload import Plan, Workload, make_plan, make_workload

__all__ = ["Failure", "planned_workload", "run_steps"]

#: Errors of a missing package or server binary.
_ABSENT = (ImportError, InputError)

#: Batches of the residents: few enough to lie on the device, enough that rows differ between steps.
_RESIDENT_BATCHES = 16


class Failure(Exception):
    """Runs of the engine failed; the results of the others are kept."""


def planned_workload(settings: Settings, say: Callable[[str], None]) -> tuple[Workload, Plan]:
    """The batches and the steps of a cached run; the same for every store."""
    workload = make_workload(settings)
    spec = CachedBags(workload.schema, settings.dim).spec(num_slots=workload.cache_rows, lookahead=settings.lookahead)
    return workload, make_plan(workload, spec, say)


def run_steps(workload: Workload, plan: Plan, say: Callable[[str], None], keep: Callable[[Any], None]) -> None:
    """Measure; `keep` gets what there is after every run.

    Raises:
        Failure: after all runs, one of ours failed.
    """
    settings = workload.settings
    failed: list[str] = []
    found: dict[str, Any] = {
        "total_rows": workload.total_rows,
        "cache_rows": workload.cache_rows,
        "num_steps": len(plan.steps),
        "plan_s": median_s(plan.plan_s[-settings.measured_steps :]),
        "resident_s": {},
        "resident_again_s": {},
        "cached": {},
        "missing": {},
    }
    timed = plan.steps[settings.warmup_steps : settings.warmup_steps + _RESIDENT_BATCHES]
    failed += _residents(workload, timed, found["resident_s"], found["missing"], say)
    keep(found)
    for name, open_stores in store_makers(settings.servers).items():
        try:
            with open_stores() as make_store:
                record = run_cached(workload, plan.steps, make_store)
        except Exception as error:  # the other runs continue
            found["missing"][f"cached over {name}"] = _why(error)
            say(f"steps: without {name} ({_why(error)})")
            if not isinstance(error, _ABSENT):
                traceback.print_exc()
                failed.append(f"cached over {name}")
            continue
        finally:
            _free(settings)
        found["cached"][name] = record
        say(
            f"steps: cached over {name}: p50 {record['step_p50_s'] * 1e3:.2f} ms, {record['rows_fetched']:.0f} rows "
            f"fetched and {record['rows_written']:.0f} written a step, loss {record['loss']:.6f}"
        )
        keep(found)
    failed += _residents(workload, timed, found["resident_again_s"], found["missing"], say)
    keep(found)
    if failed:
        raise Failure(", ".join(failed))


def _residents(
    workload: Workload,
    steps: Sequence[RankBatch],
    into: dict[str, float],
    missing: dict[str, str],
    say: Callable[[str], None],
) -> list[str]:
    """Time the resident contestants; returns those of ours that failed."""
    settings, failed = workload.settings, []
    for name, open_resident in RESIDENTS.items():
        try:
            with open_resident(workload, steps) as resident:
                times_s = step_times(resident, len(steps), settings.measured_steps, torch.device(settings.device))
        except Exception as error:
            missing[f"all rows resident, {name}"] = _why(error)
            say(f"steps: without all rows resident, {name} ({_why(error)})")
            if name == "ours":
                traceback.print_exc()
                failed.append("ours, all rows resident")
            continue
        finally:
            _free(settings)
        into[name] = median_s(times_s)
        say(f"steps: all rows resident, {name}: p50 {into[name] * 1e3:.2f} ms")
    return failed


def _why(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _free(settings: Settings) -> None:
    """Release device memory before the next run."""
    gc.collect()
    if torch.device(settings.device).type == "cuda":
        torch.cuda.empty_cache()
