"""A small job without torchrec, opened as both programs open theirs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import CheckpointConfig, DataConfig, StoreConfig
from bagpipe.dense.executor import EagerExecutor
from bagpipe.embedding.plain_bags import CachedBags, PlainInputs
from bagpipe.jobs.job import Job, RankDense
from bagpipe.jobs.open_job import open_job
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.session import JobSession
from bagpipe.models.plain_dlrm import PlainDLRM
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import EngineSettings
from bagpipe.training.progress import RunResult
from bagpipe.training.weights import ResidentWeights
from bagpipe.training.whole_dense import WholeDense
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema
from data import open_loader, open_source

DATA = DataConfig(format="synthetic", limit=1_500, batch_size=100, workers=0, eval_fraction=0.0)
NUM_BATCHES = 15


class SmallJob:
    """A job over `DATA`. What it keeps in a namespace of memory stays for the jobs after it.

    Args:
        cache_rows: rows in the cache.
        namespace: name of the store in memory; default: a new one.
        folder: of checkpoints.
    """

    def __init__(self, cache_rows: int = 9_000, namespace: str = "", folder: Path | None = None) -> None:
        schema = open_source(DATA, seed=0).schema
        torch.manual_seed(0)
        self.bags = CachedBags(schema, 8, None)
        num_dense, num_features = len(schema.dense), len(schema.features)
        self.model = PlainDLRM(
            self.bags, num_dense=num_dense, num_features=num_features, dim=8, bottom_mlp=(16,), top_mlp=(16,)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.spec = self.bags.spec(num_slots=cache_rows, lookahead=3)
        self.job = Job(
            model=self.model,
            layout=self.bags.layout,
            bind=self.bags.bind,
            rows=RowSchema(tables=self.bags.row_tables, optimizer="adagrad", dtype="float32", seed=0),
            device=torch.device("cpu"),
            num_slots=self.spec.slots_per_rank,
            engine=EngineSettings(prefetch_depth=2, read_ahead=4, rows_lr=0.1, eps=1e-8),
            store=StoreConfig(url=f"memory://{namespace or uuid.uuid4().hex}"),
            checkpoint=CheckpointConfig(dir=str(folder or "")),
            peer_timeout_s=20.0,
            make_dense=self._make_dense,
            prepare=PlainInputs(schema),
            settings={},
        )

    def _make_dense(self, cache: RowCache, ranks: Ranks, stack: ExitStack) -> RankDense:
        return RankDense(
            dense=WholeDense(weights=ResidentWeights(self.model, self.optimizer), executor=EagerExecutor(self.model))
        )

    def batches(
        self, first: int = 0, last: int = NUM_BATCHES, change: Callable[[Batch], Batch] = lambda batch: batch
    ) -> Generator[RankBatch, None, None]:
        """Planned batches of the data."""
        with open_loader(DATA, seed=0) as loader:
            yield from plan_rank_batches((change(b) for b in loader if first <= b.index < last), self.spec)

    @contextmanager
    def session(self, **settings: Any) -> Iterator[JobSession]:
        with ExitStack() as stack:
            job = open_job(self.job, Ranks(), stack)
            yield stack.enter_context(JobSession(job, stack.pop_all(), **settings))

    def train(self, session: JobSession, first: int = 0, last: int = NUM_BATCHES) -> RunResult:
        """Train a run to its end."""
        run = session.begin(self.batches(first, last), first)
        with session.failing():
            while run.step() is not None:
                pass
        return session.end()

    def break_at(self, batch: int) -> None:
        """The forward of a batch raises ZeroDivisionError."""
        seen = iter(range(batch))

        def breaks(module: nn.Module, arguments: object) -> None:
            if next(seen, None) is None:
                raise ZeroDivisionError("division by zero")

        self.model.register_forward_pre_hook(breaks)

    def digests(self, session: JobSession) -> tuple[str, str]:
        return dense_digest(self.model, self.optimizer), embedding_digest(session.job.store)
