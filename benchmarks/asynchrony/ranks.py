"""Jobs of two stages on two ranks, round by round: time of a step, and the simulator's from the times of actions."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagpipe.schedule.analysis.costs import measured_costs
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.lowering.turns import turn_loop
from benchmarks.asynchrony.throughput import steady
from benchmarks.harness.child import run_child

__all__ = ["JOBS", "round_of"]

MICROBATCHES = 8
#: Schedule and `pipeline.rows_delay`.
JOBS = (("1f1b", 0), ("pipedream", 0), ("pipedream", 1), ("pipeoptim", 1))
#: Two stages of about the same work, in which the rows take little of it.
MODEL = [
    "--model.embedding_dim", "8", "--model.bottom_mlp", "1024,512,8", "--model.top_mlp", "512,256",
    "--data.batch_size", "2048", "--data.eval_fraction", "0", "--cache.rows", "60000", "--optim.dense", "adam",
    "--run.threads", "1",
]  # fmt: skip
#: Stages that the embedding stage feeds, with gradients: the bottom one, and that of the interaction.
_EMBEDDING_EDGES = ((0, True), (1, True))
_TIMEOUT_S = 500.0


def round_of(examples: int) -> dict[str, dict[str, float]]:
    """One run of every job: ``schedule/rows_delay`` -> measured and simulated seconds of a step.

    The simulator has the median times of the actions of this round's 1f1b.

    Raises:
        JobError: a job failed.
    """
    found: dict[str, dict[str, float]] = {}
    costs: Mapping[str, float] = {}
    for schedule, rows_delay in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--pipeline.schedule", schedule, "--pipeline.rows_delay", str(rows_delay)]
            flags += ["--data.limit", str(examples), "--run.trace", f"{folder}/trace.json"]
            measured_s = _run([*flags, "--result", f"{folder}/result.json"], Path(folder))
            costs = costs or _costs([Path(folder) / "trace.json", Path(folder) / "trace.rank1.json"])
        found[f"{schedule}/{rows_delay}"] = {
            "measured_s": measured_s, "simulated_s": simulated_s(schedule, rows_delay, costs)
        }  # fmt: skip
    return found


def simulated_s(schedule: str, rows_delay: int, costs: Mapping[str, float]) -> float:
    """Time of a batch in the steady state, on two ranks.

    Args:
        schedule: its name.
        rows_delay: see `bagpipe.schedule.lowering.step_program`.
        costs: seconds of actions.
    """
    graph = chain(2, MICROBATCHES)
    step = step_program(graph, _EMBEDDING_EDGES, schedule, num_processes=2, rows_delay=rows_delay)
    if not step.turns:
        return float(simulate(step.program, costs).makespan)
    return steady(turn_loop(step.program, step.turns, step.embedding_stages[0]), costs, first=8)


def _run(flags: Sequence[str], folder: Path) -> float:
    stages = ["--pipeline.stages", "2", "--pipeline.microbatches", str(MICROBATCHES)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    result = run_child(
        [*command, *MODEL, *stages, *flags], folder / "result.json", name="the job", timeout_s=_TIMEOUT_S
    )
    return float(result["step_s_p50"])


def _costs(traces: Sequence[Path]) -> dict[str, float]:
    """Median seconds of the actions of compute lanes, by stage and operation."""
    times: dict[str, list[float]] = {}
    for path in traces:
        events = json.loads(path.read_text())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        for event in events:
            name = re.fullmatch(r"(\d+(?:X_)?[A-Z_]+)\d+(?::\d+)?", event["name"])
            if event["ph"] == "X" and event["cat"] == "action" and name and lanes[event["tid"]].startswith("compute"):
                key = f"{lanes[event['tid']]} {name[1]}" if name[1] == "0X_UPDATE" else name[1]
                times.setdefault(key, []).append(event["dur"] / 1e6)
    costs = measured_costs(times)
    # The row update follows the gradients of rows in the same lane, and has no action in the program of the stages.
    for rank in range(len(traces)):
        costs[f"{rank + 2}X_EMBED_GRAD"] += costs.pop(f"compute{rank} 0X_UPDATE")
    return costs
