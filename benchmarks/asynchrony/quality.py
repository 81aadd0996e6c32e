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

__all__ = ["SYNCHRONOUS", "Run", "Score", "flags_of", "measure", "runs_of"]

SYNCHRONOUS = "1f1b"
BATCH_SIZE = 512
NUM_EVALUATIONS = 5
#: Widths and rates are those of no paper: small enough for two cores, wide enough for four stages.
JOB = [
    "--data.eval_fraction", "0.2", "--data.batch_size", str(BATCH_SIZE),
    "--cache.rows", "60000", "--oracle.lookahead", "8",
    "--model.bottom_mlp", "64,32", "--model.top_mlp", "64,32", "--model.embedding_dim", "8",
    "--optim.dense", "adam", "--optim.dense_lr", "0.002", "--store.url", "memory://",
]  # fmt: skip
SYNTHETIC = '[synthetic]\nprofile = "criteo-kaggle"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job.

    Attributes:
        schedule: its name.
        stages, microbatches: of it.
        seed: of initial values.
    """

    schedule: str
    stages: int
    microbatches: int
    seed: int


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


def flags_of(run: Run, data: Sequence[str]) -> list[str]:
    """Flags of the job on data of these flags."""
    stages = ["--pipeline.stages", str(run.stages), "--pipeline.microbatches", str(run.microbatches)]
    return [*JOB, *data, "--pipeline.schedule", run.schedule, *stages, "--run.seed", str(run.seed)]


def measure(run: Run, path: str, examples: int) -> list[Score]:
    """Train and evaluate.

    Args:
        run: the job.
        path: Criteo's click logs; empty: synthetic ones of the full scale of Criteo Kaggle.
        examples: how many are used.
    """
    from trainer.job import run_job
    from trainer.process import configure_process

    configure_process()
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder) / "kaggle.toml"
        schema.write_text(SYNTHETIC, encoding="utf-8")
        data = ["--data.path", path, "--data.format", "criteo-tsv"] if path else ["--data.schema", str(schema)]
        steps = -(-examples * 4 // 5 // BATCH_SIZE)
        every = ["--data.limit", str(examples), "--eval.every", str(-(-steps // NUM_EVALUATIONS))]
        with redirect_stdout(io.StringIO()):
            result = run_job(_config([*flags_of(run, data), *every]))
    return [Score(step=each["step"], auc=each["auc"], log_loss=each["logloss"]) for each in result.evaluations]


def _config(flags: list[str]) -> Config:
    return parse_config(flags, "asynchrony", ()).config
