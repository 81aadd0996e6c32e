"""The trainer's own model, with the same initial dense parameters and rows, over embeddings that a contender provides.

Setting, Sample ──Peer──> model with other embeddings; initial rows; optimizer of the dense part
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import Config
from bagpipe.kernels.initialization import initial_weights
from benchmarks.peers.sample import Minibatch, Sample
from trainer.assembly import build_training_model
from trainer.optimizers import dense_optimizer

__all__ = ["Contender", "Loop", "Peer", "Untyped"]

#: A torchrec object: torchrec ships no types.
Untyped: TypeAlias = Any


class Contender(Protocol):
    """A contender as a trial runs it."""

    def steps(self, batches: Sequence[Minibatch]) -> Iterator[Tensor]:
        """Train on the batches; yields the mean loss of each when its step is done."""
        ...

    def score(self, batch: Minibatch) -> Tensor:
        """Logits ``[B]``."""
        ...


class Peer:
    """Model, initial values and optimizer for contenders other than ours.

    Args:
        config: of the job.
        sample: its data.

    Attributes:
        model: without embeddings until `put`.
    """

    def __init__(self, config: Config, sample: Sample) -> None:
        built = build_training_model(config, sample.schema)
        self.config = config
        self.sample = sample
        self.model: nn.Module = built.converted.model
        self.row_tables = built.converted.row_tables

    def configs(self) -> list[Untyped]:
        """torchrec's configurations of tables over the sample's vocabulary."""
        return [
            EmbeddingBagConfig(
                name=f"table_{number}",
                embedding_dim=table.dim,
                num_embeddings=len(self.sample.ids[number]),
                feature_names=[table.name],
                pooling=PoolingType.SUM,
            )
            for number, table in enumerate(self.row_tables)
        ]

    def initial_rows(self, table: int) -> Tensor:
        """Initial weights ``[rows, dim]``, the same as in our own runs."""
        return initial_weights(self.row_tables[table], self.sample.ids[table], seed=self.config.run.seed)

    def put(self, embeddings: nn.Module) -> nn.Module:
        """The model over these embeddings."""
        arch: Untyped = self.model.sparse_arch
        arch.embedding_bag_collection = embeddings
        return self.model.train()

    def dense_optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return dense_optimizer(parameters, self.config.optim)

    def keyed(self, batch: Minibatch) -> Untyped:
        """The batch's ids as a KeyedJaggedTensor with known offsets."""
        return KeyedJaggedTensor(
            keys=self.sample.feature_names,
            values=batch.rows,
            lengths=batch.lengths,
            offsets=batch.offsets,
            stride=batch.num_examples,
        )


class Loop:
    """A `Contender`: forward, backward, row update unless backward does it, dense step."""

    def __init__(self, peer: Peer, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._peer = peer
        self._model = model
        self._optimizers = optimizers

    def steps(self, batches: Sequence[Minibatch]) -> Iterator[Tensor]:
        inputs = [self._peer.keyed(batch) for batch in batches]
        for batch, sparse in zip(batches, inputs, strict=True):
            logits = self._model(batch.dense, sparse).reshape(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            yield loss.detach()

    def score(self, batch: Minibatch) -> Tensor:
        self._model.eval()
        with torch.no_grad():
            logits: Tensor = self._model(batch.dense, self._peer.keyed(batch)).reshape(-1)
        return logits
