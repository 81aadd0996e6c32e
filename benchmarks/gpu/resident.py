"""All rows in device memory: the same DLRM and batches, uploaded in advance, one stream, no store. The lower bound.

ours        `CachedBags` over a cache with a slot for every row, plans uploaded before
torch       one weight for all tables, `embedding_bag` with sparse gradients, a `torch.optim` optimizer
FBGEMM      one table-batched module whose backward updates the rows (what TorchRec trains with)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.cache.batch_context import BatchContext, prepare_batch
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.models.plain_dlrm import PlainDLRM
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.testing.plain_job import PlainJob, plan_rank_batches
from bagpipe.types.model_inputs import ModelInputs
from benchmarks.gpu.kernel_contestants import SPARSE_OPTIMIZERS, tbe
from benchmarks.gpu.timing import open_clock
from benchmarks.gpu.workload import Workload

__all__ = ["RESIDENTS", "Resident", "step_times"]

#: Runs step number n on batches that are already on the device.
Resident = Callable[[int], None]


def step_times(resident: Resident, num_batches: int, num_steps: int, device: torch.device) -> list[float]:
    """Seconds of each step between the ends of consecutive ones, after one round over the batches to warm up."""
    for number in range(num_batches):
        resident(number)
    with open_clock(device) as clock:
        marks = [clock.mark()]
        for number in range(num_steps):
            resident(number % num_batches)
            marks.append(clock.mark())
        return clock.seconds(list(pairwise(marks)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ready:
    context: BatchContext
    inputs: ModelInputs


def _loss(model: nn.Module, dense: Tensor, sparse: Any, labels: Tensor) -> Tensor:
    logits: Tensor = model(dense, sparse).reshape(-1)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / len(labels)


@contextmanager
def _ours(workload: Workload, steps: Sequence[RankBatch]) -> Iterator[Resident]:
    """As the engine's compute lane does it."""
    device = torch.device(workload.settings.device)
    with PlainJob(replace(workload.job(workload.total_rows), lookahead=1)) as job:
        cache, engine = job.engine.cache, job.engine
        uploads, ready = cache.uploads(1), []
        for step in plan_rank_batches([replace(step.batch, index=i) for i, step in enumerate(steps)], job.spec):
            # Rows new to a cache that never evicts get their initial values: no store is read.
            owner = replace(step.owner, fetch_new=step.owner.fetch_new | True)
            cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
            with uploads.batch() as upload:
                context = prepare_batch(engine.layout, step.batch, step.consumer, upload=upload)
                inputs = engine.prepare(step.batch, upload)
            ready.append(_Ready(context=context, inputs=inputs))

        def train(number: int) -> None:
            batch = ready[number]
            cache.begin(batch.context)
            _loss(job.model, batch.inputs.dense, batch.inputs.sparse, batch.inputs.labels).backward()  # type: ignore[no-untyped-call]
            cache.update(batch.context, engine.row_steps(number))
            engine.dense.optimizer.step()
            engine.dense.optimizer.zero_grad(set_to_none=True)

        yield train
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _TorchBags(nn.Module):
    """Pooled vectors of all tables from one weight; ids are numbered over all tables, example after example."""

    def __init__(self, rows: int, dim: int, num_features: int, device: torch.device) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(rows, dim, device=device).uniform_(-0.01, 0.01))
        self._num_features = num_features

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        ids, offsets = sparse
        pooled = nn.functional.embedding_bag(ids, self.rows, offsets, mode="sum", sparse=True, include_last_offset=True)
        return pooled.view(-1, self._num_features * self.rows.shape[1])


@contextmanager
def _torch(workload: Workload, steps: Sequence[RankBatch]) -> Iterator[Resident]:
    settings, device = workload.settings, torch.device(workload.settings.device)
    sizes = [table.rows or 0 for table in workload.schema.tables]
    bases = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    bags = _TorchBags(workload.total_rows, settings.dim, len(sizes), device)
    batches = []
    for step in steps:
        ids = step.batch.values.reshape(len(sizes), -1) + bases[:, None]
        offsets = torch.arange(ids.size + 1, device=device)
        batches.append((_dense_inputs(step, device), (torch.from_numpy(ids.T.reshape(-1).copy()).to(device), offsets)))
    model = _model(workload, bags, device)
    others = [value for name, value in model.named_parameters() if name != "bags.rows"]
    optimizers = (SPARSE_OPTIMIZERS[settings.rows_optimizer]([bags.rows]), torch.optim.SGD(others, lr=0.01))

    def train(number: int) -> None:
        (dense, labels), sparse = batches[number]
        _loss(model, dense, sparse, labels).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    yield train


class _FbgemmBags(nn.Module):
    def __init__(self, tables: list[tuple[int, int]], optimizer: str, device: torch.device) -> None:
        super().__init__()
        self.tables = tbe(tables, optimizer, device)

    def forward(self, sparse: tuple[Tensor, Tensor]) -> Tensor:
        pooled: Tensor = self.tables(*sparse)
        return pooled


@contextmanager
def _fbgemm(workload: Workload, steps: Sequence[RankBatch]) -> Iterator[Resident]:
    settings, device = workload.settings, torch.device(workload.settings.device)
    tables = [(table.rows or 0, settings.dim) for table in workload.schema.tables]
    model = _model(workload, _FbgemmBags(tables, settings.rows_optimizer, device), device)
    batches = []
    for step in steps:
        offsets = torch.arange(len(step.batch.values) + 1, device=device)
        batches.append((_dense_inputs(step, device), (torch.from_numpy(step.batch.values).to(device), offsets)))
    others = [value for name, value in model.named_parameters() if not name.startswith("bags.")]
    optimizer = torch.optim.SGD(others, lr=0.01)

    def train(number: int) -> None:
        (dense, labels), sparse = batches[number]
        _loss(model, dense, sparse, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield train


def _dense_inputs(step: RankBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(step.batch.dense).to(device), torch.from_numpy(step.batch.labels).to(device)


def _model(workload: Workload, bags: nn.Module, device: torch.device) -> PlainDLRM:
    settings = workload.settings
    model = PlainDLRM(
        bags,
        num_dense=len(workload.schema.dense),
        num_features=len(workload.schema.features),
        dim=settings.dim,
        bottom_mlp=settings.bottom_mlp,
        top_mlp=settings.top_mlp,
    )
    return model.to(device).train()


#: By name: a context in which its steps can be made.
RESIDENTS: Mapping[str, Any] = {"ours": _ours, "torch": _torch, "FBGEMM": _fbgemm}
