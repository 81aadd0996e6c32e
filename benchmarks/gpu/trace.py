"""Part `trace`: a cached run with all actions recorded, as a Perfetto trace and a picture of ten steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from bagpipe.pipeline.trace import Trace
from benchmarks.gpu.cached import run_cached, store_makers
from benchmarks.gpu.workload import Plan, Workload
from tools.draw_trace import picture, read_tracks

__all__ = ["run_trace"]

_STEPS = 10


def run_trace(
    workload: Workload, plan: Plan, folder: Path, say: Callable[[str], None], keep: Callable[[Any], None]
) -> None:
    """Train over one server, or over process memory if there is none; draw ten of the timed steps."""
    makers = store_makers(workload.settings.servers[:1])
    used, trace = "", Trace()
    for used in reversed(makers):  # servers first
        try:
            with makers[used]() as make_store:
                record = run_cached(workload, plan.steps, make_store, trace=trace)
            break
        except (ImportError, InputError) as error:
            say(f"trace: without {used} ({error})")
            trace = Trace()
    else:
        raise InputError("no store to run over")
    path = folder / "trace.json"
    trace.write(path, process="cached")
    drawn = picture(read_tracks([path]), first=workload.settings.warmup_steps, batches=_STEPS)
    (folder / "steps.svg").write_text(drawn, encoding="utf-8")
    say(f"trace: {path}, {folder / 'steps.svg'}")
    keep({"store": used, "step_p50_s": record["step_p50_s"]})
