"""`MMoE`: multi-gate mixture of experts. Several labels, each with its own mixture and tower. Needs no torchrec itself.

    features ─> bags ─┬─> experts 1 … E ──┬─ mixed by the gate of a task ──> its tower ──> its logit
                      └─> gates ──────────┘
    loss = sum over tasks of  weight of the task * mean of (weight of the example * its loss)

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018. Form:
FuxiCTR's `MMoE` (model_zoo/multitask); a gate without hidden layers is the paper's, with a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bagpipe.models.layers import mlp, pooled_width
from bagpipe.models.tasks import joined_inputs, loss_and_outputs, mix

__all__ = ["MMoE"]


class MMoE(nn.Module):
    """``model(batch)`` returns the loss and a dict of tasks -> probabilities ``[n]``; batches as in `tasks`.

    Args:
        embedding_bag_collection: maps ``batch["sparse"]`` to a KeyedTensor.
        tasks: task, the key of its labels in a batch -> its weight in the loss.
        num_dense: number of dense columns.
        num_experts: number of experts, which all tasks share.
        expert_mlp: widths of an expert.
        tower_mlp: widths of a task's tower before its logit.
        gate_mlp: hidden widths of a gate.
        dropout, batch_norm: of all hidden layers; see `bagpipe.models.layers.mlp`.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        tasks: Mapping[str, float],
        num_dense: int = 0,
        num_experts: int = 4,
        expert_mlp: Sequence[int] = (64, 32),
        tower_mlp: Sequence[int] = (32,),
        gate_mlp: Sequence[int] = (),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings, self.tasks, self.num_dense = embedding_bag_collection, dict(tasks), num_dense
        width = pooled_width(embedding_bag_collection) + num_dense
        layers: dict[str, Any] = {"dropout": dropout, "batch_norm": batch_norm}
        # Lists in the order of the tasks: a ModuleDict refuses names such as "items".
        self.experts = nn.ModuleList(mlp([width, *expert_mlp], **layers) for _ in range(num_experts))
        self.gates = nn.ModuleList(mlp([width, *gate_mlp], outputs=num_experts, **layers) for _ in tasks)
        self.towers = nn.ModuleList(mlp([expert_mlp[-1], *tower_mlp], outputs=1, **layers) for _ in tasks)

    def logits(self, dense: Tensor | None, sparse: Any) -> tuple[Tensor, ...]:
        """Logits ``[n]`` of every task."""
        inputs = joined_inputs(self.embeddings, dense, sparse, self.num_dense)
        experts = [expert(inputs) for expert in self.experts]
        return tuple(
            tower(mix(gate(inputs), experts)).squeeze(1) for gate, tower in zip(self.gates, self.towers, strict=True)
        )

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_and_outputs(self.logits(batch.get("dense"), batch["sparse"]), self.tasks, batch)
