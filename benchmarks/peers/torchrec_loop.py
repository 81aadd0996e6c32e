"""torchrec as its users run it: `EmbeddingBagCollection` in `DistributedModelParallel`, rows updated in the backward.

    one rank:   table-wise, fused kernel; a plain loop, or TrainPipelineSparseDist
    two ranks:  row-wise, fused kernel, over gloo; each rank trains half of every batch

The optimizer of the rows is given by `apply_optimizer_in_backward`, which makes the fused kernel EXACT_ADAGRAD. With
several ranks torchrec divides row gradients by their number and DistributedDataParallel averages the dense ones: both
are then those of the mean loss over the batch. `PrefetchTrainPipelineSparseDist` does not run on CPUs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from benchmarks.peers.sample import Minibatch
from benchmarks.peers.shared_model import Peer, Untyped

__all__ = ["Group", "Input", "TorchrecLoop", "WithLoss"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rank, world size and rendezvous port of a process group."""

    rank: int = 0
    world_size: int = 1
    port: int = 0

    def join(self) -> None:
        """Join torch's default process group over gloo."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            GLOO_SOCKET_IFNAME="lo",
        )
        dist.init_process_group("gloo")


class TorchrecLoop:
    """One of `Contender`.

    Args:
        peer: model and tables.
        group: entered.
        pipelined: by TrainPipelineSparseDist.
    """

    def __init__(self, peer: Peer, group: Group, *, pipelined: bool = False) -> None:
        self._peer = peer
        self._group = group
        self._pipelined = pipelined
        configs = peer.configs()
        tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        optim = peer.config.optim
        apply_optimizer_in_backward(
            torchrec.optim.Adagrad, tables.parameters(), {"lr": optim.rows_lr, "eps": optim.eps}
        )
        model = WithLoss(peer.put(tables))
        kind = "table_wise" if group.world_size == 1 else "row_wise"
        wanted = ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=group.world_size, compute_device="cpu"),
            constraints={config.name: wanted for config in configs},
        )
        sharders = [_Sharder()]
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        # Dense parameters have their values already, and meta tensors are made by the sharded module.
        self._model: Untyped = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
        self._load()
        dense = [parameter for _, parameter in in_backward_optimizer_filter(self._model.named_parameters())]
        self._optimizer = peer.dense_optimizer(dense)

    def _load(self) -> None:
        """Copy the initial rows of this rank into the tables."""
        for name, value in self._model.state_dict().items():
            if ".embedding_bags." not in name:
                continue
            number = int(name.split(".table_")[1].partition(".")[0])
            rows = self._peer.initial_rows(number)
            for shard in value.local_shards():
                (first, _), (count, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(rows[first : first + count])

    def steps(self, batches: Sequence[Minibatch]) -> Iterator[Tensor]:
        parts = [self._input(batch) for batch in batches]
        return self._pipelined_steps(parts) if self._pipelined else self._plain_steps(parts)

    def _input(self, batch: Minibatch) -> Input:
        part = batch if self._group.world_size == 1 else batch.part(self._group.rank, self._group.world_size)
        return Input(dense=part.dense, sparse=self._peer.keyed(part), labels=part.labels)

    def _plain_steps(self, parts: Sequence[Input]) -> Iterator[Tensor]:
        for part in parts:
            self._optimizer.zero_grad(set_to_none=True)
            loss, _ = self._model(part)
            loss.backward()
            self._optimizer.step()
            yield loss.detach()

    def _pipelined_steps(self, parts: Sequence[Input]) -> Iterator[Tensor]:
        pipeline: Untyped = TrainPipelineSparseDist(self._model, self._optimizer, CPU)
        source = iter(parts)
        for _ in parts:
            yield pipeline.progress(source)[0]
        pipeline.detach()

    def score(self, batch: Minibatch) -> Tensor:
        """Logits ``[B]`` of all ranks' examples, in order."""
        self._model.eval()
        with torch.no_grad():
            _, (_, logits) = self._model(self._input(batch))
        if self._group.world_size == 1:
            return logits  # type: ignore[no-any-return]
        found = [torch.empty_like(logits) for _ in range(self._group.world_size)]
        dist.all_gather(found, logits)
        return torch.cat(found)


class _Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Row-wise sharding on CPUs: torchrec offers it on GPUs only, but it works over gloo."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise"]


class WithLoss(nn.Module):
    """Adapter for torchrec's pipelines, which expect a model that returns (loss, output)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, part: Input) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.model(part.dense, part.sparse).reshape(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, part.labels)
        return loss, (loss.detach(), logits.detach())


@dataclass(eq=False)
class Input(Pipelineable):  # type: ignore[misc]
    dense: Tensor
    sparse: Untyped
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Input:
        return copy.copy(self)  # everything is on the CPU

    def record_stream(self, stream: object) -> None:
        """There are no streams on a CPU."""
