"""Contestants of part `kernels`: our kernels, torch's embedding bag with its optimizers, FBGEMM's batched tables.

Forward is timed alone, backward together with the update of the rows. The forward that a backward needs is not timed.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.kernels.interface import Bags, Gradients, Kernels, RowStep, RowView
from bagpipe.kernels.select import select_kernels
from bagpipe.kernels.torch_kernels import gather
from benchmarks.gpu.kernel_batch import RowsBatch

__all__ = ["LR", "SPARSE_OPTIMIZERS", "Backward", "Forward", "Rows", "open_contestants", "tbe"]

LR, EPS = 0.01, 1e-8

_Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
#: torch's optimizers that take sparse gradients; it has no row-wise Adagrad.
SPARSE_OPTIMIZERS: Mapping[str, _Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=LR, eps=EPS),
    "adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=LR, eps=EPS),
}
_DENSE_OPTIMIZERS: Mapping[str, _Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=LR, eps=EPS),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LR, eps=EPS),
}


class Rows(ABC):
    """The timed operations of a contestant on one batch."""

    @abstractmethod
    def prepare_update(self) -> None:
        """Prepare a backward; not timed."""

    @abstractmethod
    def forward(self) -> Tensor:
        """Pooled vectors of all bags."""

    @abstractmethod
    def update(self) -> None:
        """Gradients of the rows, and one step of their optimizer."""


class Forward:
    """A `Contestant`: the forward of `rows`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def prepare(self) -> None:
        pass

    def run(self) -> object:
        return self._rows.forward()


class Backward:
    """A `Contestant`: backward and update of `rows`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def prepare(self) -> None:
        self._rows.prepare_update()

    def run(self) -> object:
        self._rows.update()
        return None


class _OurRows(Rows):
    def __init__(self, batch: RowsBatch, kernels: Kernels, device: torch.device) -> None:
        width = batch.schema.row_width(0)
        rows = batch.schema.tables[0].rows
        assert rows is not None, "the benchmark's table is bounded"
        context = batch.context(kernels)
        assert context.local is not None, "planned for one rank"
        self._kernels = kernels
        self._records = torch.rand(rows, width, device=device)
        self._slot_index = context.local.slot_index
        self._view = RowView(records=self._records, slot_index=self._slot_index, dim=context.tables.dim)
        self._bags = Bags(indices=context.inverse, offsets=context.bag_offsets, factors=None, mean=False)
        self._terms = [Gradients(vectors=batch.gradient, segment_sum=context.backward[0])]
        self._step = RowStep(lr=LR, eps=EPS, step=1)

    def forward(self) -> Tensor:
        view = self._view
        if not self._kernels.reads_slots:  # as `RowCache.begin` does
            view = RowView(records=gather(self._records, self._slot_index, view.dim), slot_index=None, dim=view.dim)
        return self._kernels.pool(view, self._bags)

    def prepare_update(self) -> None:
        """Does nothing: the backward needs only the gradient and the plan."""

    def update(self) -> None:
        self._kernels.update(self._records, self._slot_index, self._terms, self._step)


class _TorchRows(Rows):
    """`torch.nn.functional.embedding_bag`, its gradient dense or sparse, and a `torch.optim` optimizer."""

    def __init__(self, batch: RowsBatch, device: torch.device, make_optimizer: _Optimizer, *, sparse: bool) -> None:
        table = batch.schema.tables[0]
        assert table.rows is not None, "the benchmark's table is bounded"
        self._batch = batch
        self._sparse = sparse
        self._weight = nn.Parameter(torch.rand(table.rows, table.dim, device=device))
        self._optimizer = make_optimizer([self._weight])
        self._pooled: Tensor | None = None

    def forward(self) -> Tensor:
        return nn.functional.embedding_bag(
            self._batch.ids,
            self._weight,
            self._batch.offsets,
            mode="sum",
            sparse=self._sparse,
            include_last_offset=True,
        )

    def prepare_update(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._pooled = self.forward()

    def update(self) -> None:
        assert self._pooled is not None, "prepared before"
        self._pooled.backward(self._batch.gradient)  # type: ignore[no-untyped-call]
        self._optimizer.step()


class _FbgemmRows(Rows):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`, whose backward updates the rows."""

    def __init__(self, batch: RowsBatch, device: torch.device) -> None:
        table = batch.schema.tables[0]
        assert table.rows is not None, "the benchmark's table is bounded"
        self._batch = batch
        self._module = tbe([(table.rows, table.dim)], batch.schema.optimizer, device)
        self._pooled: Tensor | None = None

    def forward(self) -> Tensor:
        pooled: Tensor = self._module(self._batch.ids, self._batch.offsets)
        return pooled

    def prepare_update(self) -> None:
        self._pooled = self.forward()

    def update(self) -> None:
        assert self._pooled is not None, "prepared before"
        self._pooled.backward(self._batch.gradient)  # type: ignore[no-untyped-call]


def tbe(tables: list[tuple[int, int]], optimizer: str, device: torch.device) -> Any:
    """FBGEMM's module over tables (rows, dim), with random weights. ImportError where it is not installed."""
    with warnings.catch_warnings():  # importing it warns about parts of its own that a build lacks
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    on_cuda = device.type == "cuda"
    where = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    what = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, where, what) for rows, dim in tables],
        optimizer={
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adam": EmbOptimType.ADAM,
        }[optimizer],
        learning_rate=LR,
        eps=EPS,
        device=device,
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    return module


def open_contestants(batch: RowsBatch, device: torch.device, say: Callable[[str], None]) -> dict[str, Rows]:
    """Contestants that run on this machine, by name; `say` gets the reason why another does not.

    Raises:
        Exception: our kernels fail on a device they support.
    """
    optimizer = batch.schema.optimizer
    found: dict[str, Rows] = {}
    for choice in ("triton", "torch"):
        try:
            found[f"ours, {choice}"] = _OurRows(batch, select_kernels(batch.schema, device, choice), device)
        except InputError as error:  # no such kernels for this device
            say(f"kernels: without ours, {choice} ({error})")
    makers: dict[str, Callable[[], Rows]] = {"FBGEMM TBE": lambda: _FbgemmRows(batch, device)}
    if optimizer in SPARSE_OPTIMIZERS:
        makers["embedding_bag, sparse"] = lambda: _TorchRows(batch, device, SPARSE_OPTIMIZERS[optimizer], sparse=True)
        makers["embedding_bag, dense"] = lambda: _TorchRows(batch, device, _DENSE_OPTIMIZERS[optimizer], sparse=False)
    for name, make in makers.items():
        try:
            found[name] = _tried(make(), device)
        except Exception as error:  # not installed, not built for this device, or too large: the others still run
            say(f"kernels: without {name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
    return found


def _tried(rows: Rows, device: torch.device) -> Rows:
    """The same, after one run of every operation: the first launch shows what a build or device lacks."""
    rows.forward()
    rows.prepare_update()
    rows.update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return rows
