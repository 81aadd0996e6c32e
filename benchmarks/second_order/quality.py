"""Validation NE along training: which jobs are run on which data, and the flags of one.

tries of every contestant, one seed, scored at the end ──best NE──> its settings ──other seeds──> NE over examples
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.asynchrony.sources import SOURCES
from benchmarks.second_order.contestants import ADAGRAD, CONTESTANTS, VARIANTS, Settings, contestant_of
from benchmarks.second_order.job import Outcome, measure, measure_ranks

__all__ = ["BATCH_SIZE", "DATA", "Data", "Run", "chosen", "flags_of", "measure_run", "rank_runs", "runs", "tries"]

BATCH_SIZE = 512
#: Widths are those of no paper: small enough for two cores. Rows have the same optimizer and rate in all jobs.
JOB = [
    "--data.batch_size", str(BATCH_SIZE), "--cache.rows", "60000", "--oracle.lookahead", "8", "--run.threads", "1",
    "--model.bottom_mlp", "64,32", "--model.top_mlp", "64,32", "--model.embedding_dim", "8",
    "--optim.rows", "adagrad", "--optim.rows_lr", "0.02",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Data of a part.

    Attributes:
        source: a name of `SOURCES`.
        title: of its table.
        held_out: share of the examples, the last ones.
        tried_examples, tried_held_out: the same in the tries.
        try_seeds: number of seeds of each try.
        evaluations: of a run, the one at the end included.
    """

    source: str
    title: str
    held_out: float = 0.2
    tried_examples: int
    tried_held_out: float = 0.2
    try_seeds: int = 1
    evaluations: int = 20


#: Seeds of tries; runs have 1, 2, …
TRY_SEEDS = (0, 101)
#: By part. 2 million synthetic examples are too many to try with. The sample's held-out examples have 500 clicks: NE at
#: the end varies between seeds by as much as between settings.
DATA: Mapping[str, Data] = {
    "sample": Data(source="sample", title="Criteo Terabyte sample", tried_examples=80_000, try_seeds=2),
    "synthetic": Data(
        source="synthetic", title="synthetic Criteo Kaggle", held_out=0.025, tried_examples=100_000, evaluations=16
    ),
    "movielens": Data(source="movielens", title="synthetic ratings like MovieLens'", tried_examples=200_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job.

    Attributes:
        name: of a contestant, or of a variant.
        settings: of its contestant.
        seed: of initial values, and of data that is drawn.
        ranks: of the job.
        factors: `optim.kfac_factors` of K-FAC.
        is_try: it is scored at the end only, on fewer examples.
    """

    name: str
    settings: Settings = field(default_factory=dict)
    seed: int
    ranks: int = 1
    factors: str = "summed"
    is_try: bool = False


def tries(data: Data) -> Iterator[Run]:
    """All tries of all contestants."""
    for name, contestant in CONTESTANTS.items():
        for settings in contestant.tries:
            for seed in TRY_SEEDS[: data.try_seeds]:
                yield Run(name=name, settings=settings, seed=seed, is_try=True)


def chosen(tried: Sequence[tuple[Run, Outcome]]) -> dict[str, Settings]:
    """The settings of each contestant with the least NE at the end, in the mean over its seeds.

    Settings are left out where fewer seeds than elsewhere have ended well.
    """
    found: dict[str, Settings] = {}
    for name, contestant in CONTESTANTS.items():
        ends = [
            [outcome["scores"][-1]["ne"] for run, outcome in tried if (run.name, run.settings) == (name, settings)]
            for settings in contestant.tries
        ]
        most = max(map(len, ends))
        _, best = min((fmean(nes), number) for number, nes in enumerate(ends) if len(nes) == most)
        found[name] = contestant.tries[best]
    return found


def runs(settings: Mapping[str, Settings], seeds: int) -> Iterator[Run]:
    """Every contestant and variant with seeds that no try has had, seed by seed."""
    for seed in range(1, seeds + 1):
        for name in (*CONTESTANTS, *VARIANTS):
            yield Run(name=name, settings=settings[VARIANTS.get(name, (name, {}))[0]], seed=seed)


def rank_runs(settings: Mapping[str, Settings], seeds: int) -> Iterator[Run]:
    """Adagrad and both forms of K-FAC on two ranks. K-FAC's settings are those chosen on one rank."""
    for seed in range(1, seeds + 1):
        yield Run(name=ADAGRAD, settings=settings[ADAGRAD], seed=seed, ranks=2)
        for name in (name for name in CONTESTANTS if name.startswith("kfac")):
            for factors in ("summed", "local"):
                yield Run(name=name, settings=settings[name], seed=seed, ranks=2, factors=factors)


def flags_of(run: Run, data: Data, examples: int) -> list[str]:
    """Flags of a job, without those of its data's source."""
    held_out = data.tried_held_out if run.is_try else data.held_out
    steps = -(-int(examples * (1 - held_out)) // BATCH_SIZE)
    every = 0 if run.is_try else -(-steps // data.evaluations)
    optim = contestant_of(run.name, run.settings)
    factors = ["--optim.kfac_factors", run.factors] if run.name.startswith("kfac") else []
    store = ["--store.url", "memory://"] if run.ranks == 1 else []
    return [
        *JOB, *optim, *factors, *store, "--data.limit", str(examples), "--data.eval_fraction", str(held_out),
        "--eval.every", str(every), "--run.seed", str(run.seed),
    ]  # fmt: skip


def measure_run(run: Run, part: str, path: str, examples: int) -> Outcome:
    """Train and evaluate.

    Args:
        run: the job.
        part: a name of `DATA`.
        path: Criteo's click logs, for the source that reads them.
        examples: of the part; a try may have fewer.
    """
    data = DATA[part]
    count = min(examples, data.tried_examples) if run.is_try else examples
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_of(run, data, count), *SOURCES[data.source](Path(folder), path, count, run.seed)]
        if run.ranks > 1:
            return measure_ranks(flags, run.ranks, Path(folder))
        return measure(flags)
