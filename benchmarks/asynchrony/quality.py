"""One training job by a schedule: AUC and log loss of the held-out examples over time."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from benchmarks.asynchrony.sources import SOURCES

__all__ = ["LATE_SCHEDULES", "SYNCHRONOUS", "Run", "Score", "flags_of", "late_runs_of", "measure", "runs_of"]

SYNCHRONOUS = "1f1b"
BATCH_SIZE = 512
NUM_EVALUATIONS = 5
#: Batches that an evaluation during training scores at most; the one at the end scores all held-out examples.
EVALUATED_BATCHES = 100
#: Widths and rates are those of no paper: small enough for two cores, wide enough for four stages.
JOB = [
    "--data.eval_fraction", "0.2", "--data.batch_size", str(BATCH_SIZE),
    "--cache.rows", "60000", "--oracle.lookahead", "8",
    "--model.bottom_mlp", "64,32", "--model.top_mlp", "64,32", "--model.embedding_dim", "8",
    "--optim.dense", "adam", "--optim.dense_lr", "0.002", "--store.url", "memory://",
]  # fmt: skip
#: Those compared with rows that are read a batch late.
LATE_SCHEDULES = ("pipedream", "pipedream-2bw", "spectrain", "pipeoptim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job.

    Attributes:
        schedule: its name.
        stages, microbatches: of it.
        seed: of initial values, and of data that is drawn.
        rows_delay: `pipeline.rows_delay`.
    """

    schedule: str
    stages: int
    microbatches: int
    seed: int
    rows_delay: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """An evaluation.

    Attributes:
        step: batches trained before.
        auc, log_loss: of the held-out examples.
    """

    step: int
    auc: float
    log_loss: float


def runs_of(settings: Sequence[tuple[int, int]], seeds: int) -> Iterator[Run]:
    """The synchronous job, which is the same for any stages, and all asynchronous ones, seed by seed.

    pipedream-2bw has the fewest micro-batches that it allows, if the setting has fewer.
    """
    for seed in range(seeds):
        yield Run(schedule=SYNCHRONOUS, stages=2, microbatches=4, seed=seed)
        for stages, microbatches in settings:
            for schedule in ASYNCHRONOUS_SCHEDULES:
                least = stages - 1 if schedule == "pipedream-2bw" else 1
                yield Run(schedule=schedule, stages=stages, microbatches=max(microbatches, least), seed=seed)


def late_runs_of(settings: Sequence[tuple[int, int]], seeds: int) -> Iterator[Run]:
    """The synchronous job, and `LATE_SCHEDULES` with rows that are synchronous and that are a batch late."""
    for seed in range(seeds):
        yield Run(schedule=SYNCHRONOUS, stages=2, microbatches=4, seed=seed)
        for stages, microbatches in settings:
            for schedule in LATE_SCHEDULES:
                for delay in (0, 1):
                    yield Run(schedule=schedule, stages=stages, microbatches=microbatches, seed=seed, rows_delay=delay)


def flags_of(run: Run, data: Sequence[str]) -> list[str]:
    """Flags of the job on data of these flags."""
    stages = ["--pipeline.stages", str(run.stages), "--pipeline.microbatches", str(run.microbatches)]
    late = ["--pipeline.rows_delay", str(run.rows_delay)] if run.rows_delay else []
    return [*JOB, *data, "--pipeline.schedule", run.schedule, *stages, *late, "--run.seed", str(run.seed)]


def measure(run: Run, source: str, path: str, examples: int, evaluations: int = NUM_EVALUATIONS) -> list[Score]:
    """Train and evaluate.

    Args:
        run: the job.
        source: a name of `SOURCES`.
        path: Criteo's click logs, for the source that reads them.
        examples: how many are used.
        evaluations: how many, the one at the end included.
    """
    from trainer.job import run_job
    from trainer.process import configure_process

    configure_process()
    with tempfile.TemporaryDirectory() as folder:
        data = [*SOURCES[source](Path(folder), path, examples, run.seed), "--data.limit", str(examples)]
        steps = -(-examples * 4 // 5 // BATCH_SIZE)
        every = -(-steps // evaluations) if evaluations > 1 else 0
        flags = ["--eval.every", str(every), "--eval.batches", str(EVALUATED_BATCHES)]
        with redirect_stdout(io.StringIO()):
            result = run_job(_config([*flags_of(run, data), *flags]))
    assert result.auc is not None, "examples of both labels are held out"
    assert result.logloss is not None, "examples are held out"
    during = [each for each in result.evaluations if each["step"] < result.steps]
    scores = [Score(step=each["step"], auc=each["auc"], log_loss=each["logloss"]) for each in during]
    return [*scores, Score(step=result.steps, auc=result.auc, log_loss=result.logloss)]


def _config(flags: list[str]) -> Config:
    return parse_config(flags, "asynchrony", ()).config
