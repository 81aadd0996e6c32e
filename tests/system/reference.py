"""Reference training without this project: plain modules, `nn.EmbeddingBag` / `nn.Embedding`, `torch.optim`, one loop.

It takes only initial values, as arrays. Every table is one module over the vocabulary of the data; `np.searchsorted`
maps raw ids to its row numbers. The models are torchrec's classes over plain embeddings, built independently with the
widths of the `clicks` jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mlp import MLP
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedTensor

from tests.models.plain_fuxictr import PlainDCNv2, PlainDeepFM, PlainFinalMLP
from tests.models.plain_tasks import PlainESMM, PlainMMoE, PlainPLE, PlainTaskLogits
from tests.system.factory import Towers, padded
from tests.system.plain_rows import STATES

__all__ = ["PLAIN_MODELS", "MakeScheduler", "PlainBatch", "PlainTable", "PlainTables", "plain_training", "row_state"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainTable:
    """One table: name, features that read it, pooling, vocabulary and initial weights."""

    name: str
    features: tuple[str, ...]
    pooling: str
    ids: NDArray[np.int64]  # [num_rows], ascending
    weights: Tensor  # [num_rows, dim]
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainBatch:
    """One batch: bags per feature as (ids, lengths, weights or None)."""

    dense: Tensor
    labels: Tensor
    bags: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32] | None]]


class PlainTables(nn.Module):
    """All tables, one module each, with the interface of torchrec's collection."""

    def __init__(self, tables: Sequence[PlainTable], *, sparse: bool) -> None:
        super().__init__()
        self.tables = tuple(tables)
        modules: list[nn.Module] = []
        for table in tables:
            rows, dim = table.weights.shape
            module: nn.Embedding | nn.EmbeddingBag
            if table.pooling == "none":
                module = nn.Embedding(rows, dim, sparse=sparse, dtype=table.weights.dtype)
            else:
                module = nn.EmbeddingBag(rows, dim, mode=table.pooling, sparse=sparse, dtype=table.weights.dtype)
            module.weight.data.copy_(table.weights)
            modules.append(module)
        self.rows = nn.ModuleList(modules)
        self.batch: PlainBatch | None = None

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.weights.shape[1],
                num_embeddings=max(1, len(table.ids)),
                feature_names=list(table.features),
            )
            for table in self.tables
        ]

    def vectors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Per feature of the tables: name, vectors, and bag lengths."""
        assert self.batch is not None
        for table, module in zip(self.tables, self.rows, strict=True):
            for feature in table.features:
                ids, lengths, weights = self.batch.bags[feature]
                numbers = torch.from_numpy(np.searchsorted(table.ids, ids))
                if table.name not in names:
                    continue
                if table.pooling == "none":
                    yield feature, module(numbers), torch.from_numpy(lengths)
                    continue
                offsets = torch.from_numpy(np.cumsum(lengths) - lengths).long()
                per_id = None
                if table.weighted:
                    ones = np.ones(len(ids), np.float32)
                    per_id = torch.from_numpy(ones if weights is None else weights).to(module.weight.dtype)  # type: ignore[arg-type]
                yield feature, module(numbers, offsets, per_sample_weights=per_id), torch.from_numpy(lengths)

    def forward(self, _: object) -> KeyedTensor:
        """Pooled vectors of all bag tables."""
        names = [table.name for table in self.tables if table.pooling != "none"]
        found = list(self.vectors(names))
        vectors = [vector for _, vector, _ in found]
        return KeyedTensor(
            keys=[name for name, _, _ in found],
            length_per_key=[vector.shape[1] for vector in vectors],
            values=torch.cat(vectors, dim=1),
        )


class PlainWideDeep(nn.Module):
    """A linear part over each bag's first element and the dense columns, next to an MLP over the rest."""

    def __init__(self, tables: PlainTables, num_dense: int, top: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = tables
        widths = [table.weights.shape[1] - 1 for table in tables.tables for _ in table.features]
        self.wide_dense = nn.Linear(num_dense, 1)
        self.deep = MLP(num_dense + sum(widths), list(top))
        self.head = nn.Linear(top[-1], 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        vectors = list(self.embeddings(sparse).to_dict().values())
        wide = sum(vector[:, :1] for vector in vectors) + self.wide_dense(dense)
        deep = self.head(self.deep(torch.cat([dense, *(vector[:, 1:] for vector in vectors)], dim=1)))
        logits: Tensor = wide + deep
        return logits


class PlainTowers(nn.Module):
    """Seven MLPs over the dense columns and a seventh of the features each, and one over their outputs."""

    def __init__(self, tables: PlainTables, num_dense: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = tables
        dims = [table.weights.shape[1] for table in tables.tables for _ in table.features]
        self.shares = [range(len(dims) * tower // 7, len(dims) * (tower + 1) // 7) for tower in range(7)]
        self.branches = nn.ModuleList(
            MLP(num_dense + sum(dims[number] for number in share), list(bottom)) for share in self.shares
        )
        self.top = MLP(7 * bottom[-1], list(top))
        self.head = nn.Linear(top[-1], 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        vectors = list(self.embeddings(sparse).to_dict().values())
        outs = [
            branch(torch.cat([dense, *(vectors[number] for number in share)], dim=1))
            for branch, share in zip(self.branches, self.shares, strict=True)
        ]
        logits: Tensor = self.head(self.top(torch.cat(outs, dim=1)))
        return logits


class PlainMixed(nn.Module):
    """The same model as `tests.system.factory.Mixed`, over plain embeddings."""

    def __init__(self, tables: PlainTables, dim: int) -> None:
        super().__init__()
        self.embeddings = tables
        self.towers = Towers(3 * dim + 5, dim)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        vectors = [
            vector for name in ("goods", "topic", "also_user") for _, vector, _ in self.embeddings.vectors([name])
        ]
        ((_, history, lengths),) = self.embeddings.vectors(["history"])
        logits: Tensor = self.towers(dense, torch.cat(vectors, dim=1), padded(history, lengths))
        return logits


def _deepfm(tables: PlainTables, num_dense: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> nn.Module:
    model = SimpleDeepFMNN(
        num_dense_features=num_dense,
        embedding_bag_collection=tables,
        hidden_layer_size=bottom[0],
        deep_fm_dimension=top[0],
    )
    model.over_arch.model[-1] = nn.Identity()
    return model  # type: ignore[no-any-return]


def _dcnv2(tables: PlainTables, num_dense: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> nn.Module:
    num_features = sum(len(table.features) for table in tables.tables)
    return DLRM_DCN(  # type: ignore[no-any-return]
        embedding_bag_collection=tables,
        dense_in_features=num_dense,
        dense_arch_layer_sizes=[*bottom, dim],
        over_arch_layer_sizes=[*top, 1],
        dcn_num_layers=3,
        dcn_low_rank_dim=min(512, (num_features + 1) * dim),
    )


def _dlrm(tables: PlainTables, num_dense: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> nn.Module:
    return DLRM(  # type: ignore[no-any-return]
        embedding_bag_collection=tables,
        dense_in_features=num_dense,
        dense_arch_layer_sizes=[*bottom, dim],
        over_arch_layer_sizes=[*top, 1],
    )


_TASKS = {"label": 1.0, "buy": 1.0}

#: (tables, dense columns, dimension, bottom widths, top widths) -> model.
PLAIN_MODELS: Mapping[str, Callable[[PlainTables, int, int, Sequence[int], Sequence[int]], nn.Module]] = {
    "dlrm": _dlrm,
    "dcnv2": _dcnv2,
    "deepfm": _deepfm,
    "wide-deep": lambda tables, num_dense, dim, bottom, top: PlainWideDeep(tables, num_dense, top),
    "towers": lambda tables, num_dense, dim, bottom, top: PlainTowers(tables, num_dense, bottom, top),
    "dcnv2-fuxictr": lambda tables, num_dense, dim, bottom, top: PlainDCNv2(tables, num_dense, dim, top),
    "deepfm-fuxictr": lambda tables, num_dense, dim, bottom, top: PlainDeepFM(tables, num_dense, dim, top),
    "finalmlp": lambda tables, num_dense, dim, bottom, top: PlainFinalMLP(tables, num_dense, dim, (bottom, top)),
    # of two labels, with one shared expert; a level of PLE has two experts of each label
    "mmoe": lambda tables, num_dense, dim, bottom, top: PlainTaskLogits(
        PlainMMoE(tables, _TASKS, num_dense, 1, bottom, top)
    ),
    "ple": lambda tables, num_dense, dim, bottom, top: PlainTaskLogits(
        PlainPLE(tables, _TASKS, num_dense, 2, bottom[-1], top)
    ),
    "esmm": lambda tables, num_dense, dim, bottom, top: PlainTaskLogits(PlainESMM(tables, num_dense, top)),
    "factory": lambda tables, num_dense, dim, bottom, top: PlainMixed(tables, dim),
}

#: Row optimizer -> (whether it takes sparse gradients, constructor).
_ROW_OPTIMIZERS: Mapping[str, tuple[bool, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (True, lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=lr)),
    "adagrad": (True, lambda parameters, lr, eps: torch.optim.Adagrad(parameters, lr=lr, eps=eps)),
    "rowwise_adagrad": (False, lambda parameters, lr, eps: RowWiseAdagrad(parameters, lr=lr, eps=eps)),
    "adam": (True, lambda parameters, lr, eps: torch.optim.SparseAdam(parameters, lr=lr, eps=eps)),
}
_DENSE_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=lr),
    "adagrad": lambda parameters, lr, eps: torch.optim.Adagrad(parameters, lr=lr, eps=eps),
    "adam": lambda parameters, lr, eps: torch.optim.Adam(parameters, lr=lr, eps=eps),
}

#: Makes the scheduler of an optimizer's learning rate.
MakeScheduler: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """Model, tables, optimizers and losses after training."""

    model: nn.Module
    tables: PlainTables
    rows: torch.optim.Optimizer
    dense: torch.optim.Optimizer
    losses: tuple[float, ...]


def plain_training(
    model_name: str,
    tables: Sequence[PlainTable],
    batches: Sequence[PlainBatch],
    dense_parameters: Mapping[str, Tensor],
    *,
    dim: int,
    bottom: Sequence[int],
    top: Sequence[int],
    rows: str,
    rows_lr: float,
    dense: str,
    dense_lr: float,
    eps: float,
    schedulers: Sequence[MakeScheduler | None] = (None, None),
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.binary_cross_entropy_with_logits,
    before_steps: Callable[[list[nn.Parameter], list[nn.Parameter]], object] | None = None,
    make_dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    make_rows: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Trained:
    """Train on all batches in order, on the mean loss of each.

    Args:
        dense_parameters: initial values of all parameters except the tables, by name.
        make_dense: makes the dense optimizer, in place of `dense`, `dense_lr` and `eps`.
        make_rows: makes the row optimizer, of sparse gradients, in place of `rows`, `rows_lr` and `eps`.
        loss_of: mean loss of logits and labels.
        before_steps: called with the tables and the dense parameters between backward and steps.
        schedulers: of the learning rates of rows and dense part, stepped after every batch.
    """
    sparse = True
    if make_rows is None:
        sparse, torch_s = _ROW_OPTIMIZERS[rows]
        make_rows = partial(torch_s, lr=rows_lr, eps=eps)
    plain = PlainTables(tables, sparse=sparse)
    dtype = tables[0].weights.dtype
    model = PLAIN_MODELS[model_name](plain, batches[0].dense.shape[1], dim, bottom, top).to(dtype)
    table_parameters = [module.get_parameter("weight") for module in plain.rows]
    their_ids = {id(parameter) for parameter in table_parameters}
    others = {name: value for name, value in model.named_parameters() if id(value) not in their_ids}
    assert others.keys() == dense_parameters.keys()
    for name, value in others.items():
        value.data.copy_(dense_parameters[name])
    optimizers = (
        make_rows(table_parameters),
        _DENSE_OPTIMIZERS[dense](list(others.values()), lr=dense_lr, eps=eps)
        if make_dense is None
        else make_dense(list(others.values())),
    )
    followers = [make(optimizer) for make, optimizer in zip(schedulers, optimizers, strict=True) if make is not None]
    losses = []
    for batch in batches:
        plain.batch = batch
        outputs = model(batch.dense.to(dtype), None)
        logits = outputs if isinstance(model, PlainTaskLogits) else outputs.reshape(-1)
        loss = loss_of(logits, batch.labels.to(dtype))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if before_steps is not None:
            before_steps(table_parameters, list(others.values()))
        for optimizer in optimizers:
            optimizer.step()
        for follower in followers:
            follower.step()
        losses.append(loss.item())
    return Trained(model=model, tables=plain, rows=optimizers[0], dense=optimizers[1], losses=tuple(losses))


def row_state(trained: Trained, optimizer: str, number: int) -> Tensor:
    """Records ``[num_rows, dim + state]`` of one table."""
    weight: Any = trained.tables.rows[number].weight
    state = trained.rows.state[weight]
    parts = [state[name].reshape(len(weight), state[name].shape[1:].numel()) for name in STATES[optimizer]]
    return torch.cat([weight.detach(), *parts], dim=1)
