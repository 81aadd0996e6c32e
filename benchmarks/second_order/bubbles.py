"""K-FAC in a pipeline of two ranks: time of a step with its work in the bubbles and behind the backwards.

    every round, every job in turn:  the trainer's job on two ranks ──> step_s_p50, times of its actions
    medians of the actions, without waits for the other rank ──> its own step program, repeated ──> simulated time

The simulator has no time for messages, rows, cacher and store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagpipe.config.load import parse_config
from bagpipe.schedule.analysis.periodic import periodic
from bagpipe.schedule.ir.program import Program
from benchmarks.second_order.job import measure_ranks
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
        flags = [*job.flags, "--data.limit", str(examples)]
        outcome = measure_ranks(flags, NUM_RANKS, Path(folder))
    costs = dict(outcome["actions"])
    # The row update follows the gradients of rows in the same lane, and has no action in the program of the stages.
    for rank in range(NUM_RANKS):
        costs[f"{rank + NUM_RANKS}X_EMBED_GRAD"] += costs.pop(f"compute{rank} 0X_UPDATE", 0.0)
    return {"measured_s": outcome["step_s_p50"], "simulated_s": simulated_s(program_of(job), costs)}


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
