"""Time of a step: jobs of each optimizer, model and number of ranks take turns, without evaluation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.asynchrony.sources import SOURCES
from benchmarks.second_order.contestants import ADAGRAD
from benchmarks.second_order.job import Outcome, measure_ranks

__all__ = ["MODELS", "NUM_STEPS", "StepJob", "flags_of", "measure_steps", "step_jobs"]

#: The first 20 do not count; the other 100 have one inversion with `kfac_inverse_every` 100, and ten with 10.
NUM_STEPS = 120
#: Flags of the models. `large` has the layers of MLPerf's DLRM, and one more to the dimension of the rows, as all have.
MODELS: Mapping[str, Sequence[str]] = {
    "small": ("--model.bottom_mlp", "64,32", "--model.top_mlp", "64,32", "--model.embedding_dim", "8"),
    "large": (
        "--model.bottom_mlp", "512,256,128", "--model.top_mlp", "1024,1024,512,256", "--model.embedding_dim", "128",
    ),
}  # fmt: skip
_KFAC = ("--optim.dense", "sgd", "--optim.momentum", "0.9", "--optim.precondition", "kfac", "--optim.dense_lr", "0.001")
#: Updates of factors and inverses.
PERIODS = ((1, 10), (10, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """A job.

    Attributes:
        model: a name of `MODELS`.
        ranks: of the job.
        optimizer: of the dense part; kfac: SGD with momentum, preconditioned.
        factors: `optim.kfac_factors`; empty: no K-FAC.
        factor_every, inverse_every: of K-FAC; 0 without it.
    """

    model: str
    ranks: int
    optimizer: str
    factors: str = ""
    factor_every: int = 0
    inverse_every: int = 0


def step_jobs(models: Sequence[str], ranks: Sequence[int] = (1, 2)) -> Iterator[StepJob]:
    """The jobs of a round."""
    for model in models:
        for count in ranks:
            for optimizer in (ADAGRAD, "adamw", "sgd"):
                yield StepJob(model=model, ranks=count, optimizer=optimizer)
            for factors in ("summed", "local")[:count]:
                for factor, inverse in PERIODS:
                    yield StepJob(
                        model=model,
                        ranks=count,
                        optimizer="kfac",
                        factors=factors,
                        factor_every=factor,
                        inverse_every=inverse,
                    )


def flags_of(job: StepJob, batch_size: int) -> list[str]:
    """Flags of a job, without those of its data's source."""
    optim = ["--optim.dense", job.optimizer, "--optim.dense_lr", "0.001"]
    if job.optimizer == "kfac":
        every = ["--optim.kfac_factor_every", str(job.factor_every)]
        every += ["--optim.kfac_inverse_every", str(job.inverse_every)]
        optim = [*_KFAC, "--optim.kfac_factors", job.factors, *every]
    store = ["--store.url", "memory://"] if job.ranks == 1 else []
    return [
        *MODELS[job.model], *optim, *store, "--data.batch_size", str(batch_size), "--data.eval_fraction", "0",
        "--data.limit", str(NUM_STEPS * batch_size), "--cache.rows", "60000", "--oracle.lookahead", "8",
        "--run.threads", "1",
    ]  # fmt: skip


def measure_steps(job: StepJob, batch_size: int) -> Outcome:
    """Train on synthetic Criteo Kaggle, in processes of torchrun for one rank too."""
    with tempfile.TemporaryDirectory() as folder:
        data = SOURCES["synthetic"](Path(folder), "", NUM_STEPS * batch_size, 0)
        return measure_ranks([*flags_of(job, batch_size), *data], job.ranks, Path(folder))
