"""A user model for ``model.factory``: weighted, mean and sequence lookups and a shared table in one model.

The towers take the pooled vectors; `tests.system.reference` builds the same model over plain embeddings.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import ModelConfig
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import build_model
from bagpipe.types.schema import DataSchema

__all__ = [
    "HISTORY_LENGTH",
    "Mixed",
    "Towers",
    "build",
    "counted",
    "dies_once",
    "halves",
    "normalised",
    "padded",
    "refuses",
    "refuses_once",
    "returns_no_module",
]

HISTORY_LENGTH = 4


class Towers(nn.Module):
    """The dense part: pooled vectors, the attention-weighted history and dense columns to one logit."""

    def __init__(self, pooled_width: int, history_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(3, history_dim)
        self.out = nn.Sequential(nn.Linear(3 + pooled_width + history_dim, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, pooled: Tensor, history: Tensor) -> Tensor:
        """Logits ``[num_examples]`` from ``[n, 3]``, ``[n, pooled_width]`` and padded ``[n, HISTORY_LENGTH, dim]``."""
        scores = (history * self.query(dense).unsqueeze(1)).sum(2, keepdim=True)
        attended = (history * torch.sigmoid(scores)).sum(1)
        logits: Tensor = self.out(torch.cat([dense, pooled, attended], dim=1)).squeeze(1)
        return logits


class Mixed(nn.Module):
    """Two bag collections and a sequence collection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        meta = torch.device("meta")

        def bag(name: str, features: list[str], pooling: PoolingType, width: int) -> EmbeddingBagConfig:
            # torchrec requires num_embeddings, but unbounded tables do not use it.
            return EmbeddingBagConfig(
                name=name, embedding_dim=width, num_embeddings=9, feature_names=features, pooling=pooling
            )

        shared = bag("goods", ["items", "queried"], PoolingType.SUM, dim)
        self.weighted = EmbeddingBagCollection(tables=[shared], is_weighted=True, device=meta)
        means = [bag("topic", ["topic"], PoolingType.MEAN, 5), bag("also_user", ["user"], PoolingType.SUM, dim)]
        self.means = EmbeddingBagCollection(tables=means, device=meta)
        sequence = EmbeddingConfig(name="history", embedding_dim=dim, num_embeddings=1, feature_names=["history"])
        self.sequence = EmbeddingCollection(tables=[sequence], device=meta)
        self.towers = Towers(3 * dim + 5, dim)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits ``[num_examples]``."""
        pooled = torch.cat([self.weighted(sparse).values(), self.means(sparse).values()], dim=1)
        vectors: Mapping[str, Any] = self.sequence(sparse)
        history = padded(vectors["history"].values(), vectors["history"].lengths())
        logits: Tensor = self.towers(dense, pooled, history)
        return logits


def padded(values: Tensor, lengths: Tensor) -> Tensor:
    """``[n, HISTORY_LENGTH, dim]`` of jagged ``[sum of lengths, dim]``; torchrec's kernel lacks float64 on CPU."""
    bags = [*torch.split(values, lengths.tolist()), values.new_zeros(HISTORY_LENGTH, values.shape[1])]
    return nn.utils.rnn.pad_sequence(bags, batch_first=True)[:-1]


def build(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory: builds `Mixed`."""
    return Mixed(config.embedding_dim)


def halves(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory's model; its tables have three data types."""
    model = Mixed(config.embedding_dim)
    types = {"goods": DataType.BF16, "also_user": DataType.FP16, "history": DataType.FP16}
    for collection in (model.weighted, model.means):
        for table in collection.embedding_bag_configs():
            table.data_type = types.get(table.name, DataType.FP32)
    for table in model.sequence.embedding_configs():
        table.data_type = types[table.name]
    return model


def returns_no_module(schema: DataSchema, config: ModelConfig) -> str:
    """An invalid factory: does not return a module."""
    return "nothing"


class Normalised(nn.Module):
    """The factory's model with a batch norm and a dropout of the dense columns, local to each rank."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.2)
        self.mixed = Mixed(dim)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits ``[num_examples]``."""
        logits: Tensor = self.mixed(self.dropout(self.norm(dense)), sparse)
        return logits


def normalised(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A factory whose model keeps running statistics of its inputs."""
    return Normalised(config.embedding_dim)


class Counter(nn.Module):
    """A module whose state is not a tensor."""

    def get_extra_state(self) -> object:
        return {"calls": 0}


def counted(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model with state that no checkpoint can hold."""
    model = build_model(schema, dataclasses.replace(config, factory=""))
    model.add_module("counter", Counter())
    return model


def _in_third_forward(model: nn.Module, act: Callable[[], None]) -> nn.Module:
    calls = itertools.count()

    def count(*_: object) -> None:
        if next(calls) == 2:
            act()

    model.register_forward_pre_hook(count)
    return model


def _refuse() -> None:
    raise InputError("the third batch is not to our taste")


def _is_rank_1() -> bool:
    return os.environ.get("RANK") == "1"


def _is_first_attempt() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def refuses(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory's model; its third forward at rank 1 raises."""
    model = build(schema, config)
    return _in_third_forward(model, _refuse) if _is_rank_1() else model


def refuses_once(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory's model; its third forward at rank 1 raises in the job's first attempt only."""
    return refuses(schema, config) if _is_first_attempt() else build(schema, config)


def dies_once(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory's model; rank 1 is killed in its third forward in the job's first attempt only."""
    model = build(schema, config)
    if not (_is_rank_1() and _is_first_attempt()):
        return model
    return _in_third_forward(model, lambda: os.kill(os.getpid(), signal.SIGKILL))
