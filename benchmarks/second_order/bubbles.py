"""K-FAC in a pipeline of two ranks: time of a step with its work in the bubbles and behind the backwards.

    every round, every job in turn:  torchrun -m trainer ──> step_s_p50, trace
    traces of the job ──median of each action──> its own step program, repeated ──> simulated time of a step

The simulator has the times of the job's compute and reduce lanes, and no time for messages, rows, cacher and store.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagpipe.config.load import parse_config
from bagpipe.schedule.analysis.costs import measured_costs
from bagpipe.schedule.analysis.periodic import periodic
from bagpipe.schedule.ir.program import Program
from benchmarks.harness.child import run_child
from data.synthetic_options import options_at
from trainer.assembly import build_training_model

__all__ = ["BUBBLE_JOBS", "BubbleJob", "measure_bubbles", "simulated_s"]

NUM_RANKS = 2
#: Two stages of about the same work, in which the rows take little of it, and whose inversions take about as long.
MODEL = [
    "--model.embedding_dim", "8", "--model.bottom_mlp", "512,512,8", "--model.top_mlp", "512,256",
    "--data.batch_size", "4096", "--data.eval_fraction", "0", "--cache.rows", "120000", "--run.threads", "1",
    "--optim.kfac_damping", "0.01",
]  # fmt: skip
_TIMEOUT_S = 500.0
_ACTION = re.compile(r"(\d+(?:X_)?[A-Z_]+)\d+(?::\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleJob:
    """A job of the contest.

    Attributes:
        schedule: its name.
        microbatches: per batch.
        lag: of the inverses; None: no K-FAC.
        placement: where K-FAC's work goes.
        inverse_every: batches between two inversions.
    """

    schedule: str
    microbatches: int = 8
    lag: int | None = None
    placement: str = "bubbles"
    inverse_every: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        return self.schedule if self.lag is None else f"{self.schedule}, lag {self.lag}, {self.placement}"

    @property
    def flags(self) -> list[str]:
        """Of the trainer."""
        found = ["--pipeline.schedule", self.schedule, "--pipeline.stages", str(NUM_RANKS)]
        found += ["--pipeline.microbatches", str(self.microbatches)]
        if self.lag is None:
            return [*MODEL[:-2], *found]
        found += ["--optim.precondition", "kfac", "--optim.kfac_lag", str(self.lag)]
        found += ["--optim.kfac_placement", self.placement, "--optim.kfac_inverse_every", str(self.inverse_every)]
        return [*MODEL, *found]


BUBBLE_JOBS = tuple(
    BubbleJob(schedule=schedule, lag=lag, placement=placement)
    for schedule in ("1f1b", "gpipe")
    for lag, placement in ((None, "bubbles"), (0, "last"), (0, "bubbles"), (1, "last"), (1, "bubbles"))
)


def measure_bubbles(job: BubbleJob, examples: int) -> dict[str, float]:
    """One run of a job: ``measured_s`` and ``simulated_s`` of a step.

    Raises:
        JobError: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, trace = Path(folder) / "result.json", Path(folder) / "trace.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        flags = [*job.flags, "--data.limit", str(examples), "--run.trace", str(trace), "--result", str(result)]
        outcome: dict[str, Any] = run_child(
            [*launcher, "-m", "trainer", *flags], result, name=job.name, timeout_s=_TIMEOUT_S
        )
        costs = _costs([trace, trace.with_name("trace.rank1.json")])
    return {"measured_s": float(outcome["step_s_p50"]), "simulated_s": simulated_s(program_of(job), costs)}


def program_of(job: BubbleJob) -> Program:
    """The program of a batch that the job runs."""
    config = parse_config(job.flags, "second_order", ()).config
    built = build_training_model(config, options_at("").schema, NUM_RANKS)
    assert built.stages is not None, "in stages"
    return built.stages.mesh.step.program


def simulated_s(program: Program, costs: Mapping[str, float]) -> float:
    """Time of a step in the steady state.

    Args:
        program: of a batch.
        costs: seconds of actions, by stage and operation.
    """
    return periodic(program, dict(costs)).period


def _costs(traces: Sequence[Path]) -> dict[str, float]:
    """Median seconds of the actions of compute and reduce lanes, by stage and operation.

    Exchanges of reduce lanes wait for other ranks, and count with the least of their times.
    """
    times: dict[str, list[float]] = {}
    waiting: set[str] = set()
    for path in traces:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        for event in events:
            name = _ACTION.fullmatch(event["name"])
            lane = lanes.get(event.get("tid"), "")
            if event["ph"] != "X" or event["cat"] != "action" or name is None:
                continue
            if lane.startswith(("compute", "reduce")):
                key = f"{lane} {name[1]}" if name[1] == "0X_UPDATE" else name[1]
                times.setdefault(key, []).append(event["dur"] / 1e6)
                if lane.startswith("reduce"):
                    waiting.add(key)
    costs = measured_costs(times) | {key: min(times[key]) for key in waiting}
    # The row update follows the gradients of rows in the same lane, and has no action in the program of the stages.
    for rank in range(len(traces)):
        costs[f"{rank + NUM_RANKS}X_EMBED_GRAD"] += costs.pop(f"compute{rank} 0X_UPDATE", 0.0)
    return costs
