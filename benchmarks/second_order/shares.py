"""Partial backwards (SPB): quality, time and bytes over shares, in jobs and in the simulator.

one        one rank, four stages in one process, micro-batches with a share each
ranks      two ranks that run all four stages each, with a share each
pipeline   two ranks with a stage each, micro-batches with a share each
simulated  time of a batch of four ranks, mean over a rotation, with a backward of twice a forward
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.partial_backward import cut_backwards, shares_of_program
from bagpipe.schedule.registry import dense_schedule
from benchmarks.asynchrony.sources import SOURCES
from benchmarks.second_order.job import Outcome, measure_ranks

__all__ = ["ShareJob", "flags_of", "measure_shares", "share_jobs", "simulated_shares"]

#: Setting -> ranks, and its flags.
SETTINGS: Mapping[str, tuple[int, Sequence[str]]] = {
    "one": (1, ("--pipeline.stages", "4", "--pipeline.microbatches", "8")),
    "ranks": (
        2,
        ("--pipeline.stages", "4", "--pipeline.microbatches", "2", "--pipeline.processes", "1"),
    ),
    "pipeline": (2, ("--pipeline.stages", "2", "--pipeline.microbatches", "8")),
}
#: Shares of four stages; of two stages those that differ there. Empty: whole backwards.
SHARES = ("", "0.75,1", "0.5,1", "0.25,0.5,0.75,1", "0,1")
PIPELINE_SHARES = ("", "0.5,1", "0.5,0.5,0.5,1", "0,1")
#: A DLRM whose dense part takes most of the time.
MODEL = (
    "--model.embedding_dim", "8", "--model.bottom_mlp", "512,256,8", "--model.top_mlp", "512,256",
    "--data.batch_size", "1024", "--cache.rows", "120000", "--oracle.lookahead", "8", "--run.threads", "1",
    "--optim.dense", "adagrad", "--optim.dense_lr", "0.02", "--data.eval_fraction", "0.2",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "breadth-first", "zb-h1")
_STAGES, _MICROBATCHES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareJob:
    """A job.

    Attributes:
        setting: a key of `SETTINGS`.
        shares: `pipeline.backward_shares`.
    """

    setting: str
    shares: str


def share_jobs(settings: Sequence[str] = tuple(SETTINGS)) -> Iterator[ShareJob]:
    """The jobs of a round; the first one of a setting has whole backwards."""
    for setting in settings:
        for shares in PIPELINE_SHARES if setting == "pipeline" else SHARES:
            yield ShareJob(setting=setting, shares=shares)


def flags_of(job: ShareJob, seed: int) -> list[str]:
    """Flags of a job, without those of its data's source."""
    ranks, stages = SETTINGS[job.setting]
    partial = ["--pipeline.backward_shares", job.shares] if job.shares else []
    if job.shares and job.setting == "ranks":
        partial += ["--pipeline.backward_unit", "rank"]
    store = ["--store.url", "memory://"] if ranks == 1 else []
    return [*MODEL, *stages, "--pipeline.schedule", "1f1b", *partial, *store, "--run.seed", str(seed)]


def measure_shares(job: ShareJob, *, source: str, path: str, examples: int, seed: int) -> Outcome:
    """Train one pass over the data, in processes of torchrun for one rank too.

    Raises:
        JobError: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = SOURCES[source](Path(folder), path, examples, seed)
        flags = [*flags_of(job, seed), *data, "--data.limit", str(examples)]
        return measure_ranks(flags, SETTINGS[job.setting][0], Path(folder))


def simulated_shares() -> dict[str, dict[str, float]]:
    """Shares -> schedule -> time of a batch in units of a forward, mean over a rotation."""
    found: dict[str, dict[str, float]] = {}
    for text in SHARES:
        shares = [float(part) for part in (text or "1").split(",")]
        found[text or "1"] = {}
        for name in SCHEDULES:
            schedule = dense_schedule(name)
            program = schedule.build(chain(_STAGES * schedule.chunks, _MICROBATCHES), None)
            rule = shares_of_program(program, shares)
            times = [simulate(cut_backwards(program, rule, batch=b)).makespan for b in range(rule.num_shares)]
            found[text or "1"][name] = fmean(times)
    return found
