"""One training job: NE of the held-out examples, time of training, and bytes of K-FAC. A program for torchrun too.

flags ──run_job under Clock and KfacMeter──> Outcome of a rank ──> of the job: times and bytes of all ranks added up

-m benchmarks.second_order.job FOLDER FLAG …     writes FOLDER/RANK.json
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness.child import run_child

__all__ = ["Outcome", "measure", "measure_ranks"]

#: JSON: `scores`, `step_s_p50`, `processor_s` of a step, `kfac`.
Outcome: TypeAlias = Mapping[str, Any]

_TIMEOUT_S = 3600.0


def measure(flags: Sequence[str]) -> Outcome:
    """Train in this process, as the rank that the environment says.

    Returns:
        `scores`: step, ne, auc, wall_s and processor_s of each evaluation. `steps`; `step_s_p50`; `processor_s`: of a
        step. `kfac`: see `KfacMeter.found`.
    """
    from bagpipe.config.load import parse_config
    from bagpipe.distributed.membership import Membership
    from benchmarks.second_order.action_times import ActionTimes
    from benchmarks.second_order.clock import Clock
    from benchmarks.second_order.meter import KfacMeter
    from benchmarks.second_order.traffic import Traffic
    from trainer.job import run_job
    from trainer.process import configure_process

    configure_process()
    clock, meter, traffic, times = Clock(), KfacMeter(), Traffic(), ActionTimes()
    with clock.watching(), meter.watching(), traffic.watching(), times.watching(), redirect_stdout(io.StringIO()):
        result = run_job(parse_config(flags, "second_order", ()).config, membership=Membership.from_environment())
    found = [*result.evaluations]
    if result.ne is not None and (not found or found[-1]["step"] < result.steps):
        found.append({"step": result.steps, "ne": result.ne, "auc": result.auc})
    scores = [
        {**{name: each[name] for name in ("step", "ne", "auc")}, **asdict(clock.marks[each["step"]])} for each in found
    ]
    return {
        "scores": scores,
        "steps": result.steps,
        "step_s_p50": result.step_s_p50,
        "processor_s": clock.per_step_s if len(clock.steps) > clock.skipped else None,
        "kfac": meter.found(result.steps),
        "rows_written": result.rows_written,
        "sent_bytes": traffic.per_step(result.steps),
        "actions": times.medians(),
    }


def measure_ranks(flags: Sequence[str], num_ranks: int, folder: Path) -> Outcome:
    """Train in processes of torchrun. Times of the processor are sums over the ranks, wall time is that of rank 0.

    Raises:
        JobError: the job failed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launcher, "-m", "benchmarks.second_order.job", str(folder), *flags]
    run_child(command, folder / "0.json", name="the job", timeout_s=_TIMEOUT_S)
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(num_ranks)]
    scores = [
        {**of_step[0], "processor_s": sum(each["processor_s"] for each in of_step)}
        for of_step in zip(*(rank["scores"] for rank in ranks), strict=True)
    ]
    processor = [rank["processor_s"] for rank in ranks]
    kfac = [rank["kfac"] for rank in ranks]
    kinds = {kind for rank in ranks for kind in rank["sent_bytes"]}
    return {
        **ranks[0],
        "scores": scores,
        "actions": {text: seconds for rank in ranks for text, seconds in rank["actions"].items()},
        "sent_bytes": {kind: sum(rank["sent_bytes"].get(kind, 0.0) for rank in ranks) for kind in sorted(kinds)},
        "processor_s": None if None in processor else sum(processor),
        "kfac": {}
        if not kfac[0]
        else {
            "sent_bytes": sum(each["sent_bytes"] for each in kfac),
            "kept_bytes": [each["kept_bytes"] for each in kfac],
            "layers": kfac[0]["layers"],
        },
    }


def _main(folder: str, flags: Sequence[str]) -> None:
    outcome = measure(flags)
    path = Path(folder) / f"{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
