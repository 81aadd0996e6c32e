"""Contenders with every row in process memory: fbgemm's table-batched embeddings, and plain PyTorch modules."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from benchmarks.peers.shared_model import Loop, Peer, Untyped

__all__ = ["batched_tables", "plain_modules"]


def batched_tables(peer: Peer) -> Loop:
    """fbgemm's module with torchrec's kernel: one lookup for all tables, rows updated in the backward."""
    tables = _BatchedTables(peer)
    model = peer.put(tables)
    dense = [parameter for name, parameter in model.named_parameters() if "embedding_bag_collection" not in name]
    return Loop(peer, model, [peer.dense_optimizer(dense)])


class _BatchedTables(nn.Module):
    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._names = peer.sample.feature_names
        self._dims = [table.dim for table in peer.row_tables]
        optim = peer.config.optim
        self.tables: Untyped = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (len(ids), dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for ids, dim in zip(peer.sample.ids, self._dims, strict=True)
            ],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=optim.rows_lr,
            eps=optim.eps,
            pooling_mode=PoolingMode.SUM,
        )
        for number, weights in enumerate(self.tables.split_embedding_weights()):
            weights.copy_(peer.initial_rows(number))

    def forward(self, features: Untyped) -> Untyped:
        vectors = self.tables(features.values(), features.offsets())
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=vectors)


def plain_modules(peer: Peer) -> Loop:
    """`nn.EmbeddingBag(sparse=True)` for each table; torch's Adagrad on the sparse gradients."""
    tables = _PlainTables(peer)
    model = peer.put(tables)
    rows = list(tables.parameters())
    dense = [parameter for name, parameter in model.named_parameters() if "embedding_bag_collection" not in name]
    optim = peer.config.optim
    return Loop(peer, model, [torch.optim.Adagrad(rows, lr=optim.rows_lr, eps=optim.eps), peer.dense_optimizer(dense)])


class _PlainTables(nn.Module):
    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._names = peer.sample.feature_names
        self._dims = [table.dim for table in peer.row_tables]
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                peer.initial_rows(number), freeze=False, mode="sum", sparse=True, include_last_offset=True
            )
            for number in range(len(self._dims))
        )

    def forward(self, features: Untyped) -> Untyped:
        stride = features.stride()
        rows, offsets = features.values(), features.offsets()
        ends = offsets[::stride].tolist()
        vectors: list[Tensor] = [
            table(
                rows[ends[number] : ends[number + 1]],
                offsets[number * stride : (number + 1) * stride + 1] - ends[number],
            )
            for number, table in enumerate(self.tables)
        ]
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=torch.cat(vectors, dim=1))
