"""torchrec's DLRM (Naumov et al. 2019, arXiv 1906.00091) on synthetic clicks, one CPU process.

python -m examples.dlrm_swap.torchrec_train --steps 200
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DIM = 16
NUM_DENSE = 4
#: Table -> rows. The feature of a table has its name.
TABLES = {"user": 20_000, "item": 50_000, "shop": 1_000, "page": 100}


def make_model(device: str = "meta") -> nn.Module:
    """The model: `forward(batch)` returns the loss and (loss, logits, labels). Its tables are on `device`."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in TABLES.items()
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=configs, device=torch.device(device)),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )
    return DLRMTrain(dlrm)


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[Batch]:
    """Clicks that depend on the user, the shop and the first dense input. Items come in bags of one to three ids."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        lengths = torch.ones(len(TABLES), batch_size, dtype=torch.int64)
        lengths[1] = torch.randint(1, 4, (batch_size,), generator=generator)
        ids = {
            # The cube makes small ids frequent.
            name: (torch.rand(int(count), generator=generator) ** 3 * rows).long()
            for (name, rows), count in zip(TABLES.items(), lengths.sum(1), strict=True)
        }
        dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        score = 2 * dense[:, 0] + (ids["user"] % 5 - 2) + (ids["shop"] % 3 - 1)
        labels = (torch.rand(batch_size, generator=generator) < torch.sigmoid(score)).float()
        sparse = KeyedJaggedTensor(
            keys=list(TABLES), values=torch.cat(list(ids.values())), lengths=lengths.flatten(), stride=batch_size
        )
        yield Batch(dense_features=dense, sparse_features=sparse, labels=labels)


def make_pipeline(model: nn.Module) -> TrainPipelineSparseDist:
    """Rows train with Adagrad, the rest with SGD."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.1, "eps": 1e-8})
    shards = {name: table_wise(rank=0, compute_kernel="fused") for name in TABLES}
    tables = construct_module_sharding_plan(
        model.model.sparse_arch.embedding_bag_collection, shards, local_size=1, world_size=1, device_type="cpu"
    )
    plan = ShardingPlan({"model.sparse_arch.embedding_bag_collection": tables})
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    return TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))


def train(pipeline: Any, batches: Iterator[Batch]) -> list[float]:
    """Train on all batches; their losses."""
    losses = []
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            return losses
        losses.append(loss.item())
        if len(losses) % 50 == 1:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    pipeline = make_pipeline(make_model())
    losses = train(pipeline, make_batches(options.steps, 256, seed=0))
    dist.destroy_process_group()
    print(f"trained {len(losses)} steps, last loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
