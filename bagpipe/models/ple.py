"""`PLE`: progressive layered extraction. Experts of each task beside shared ones, in levels. Needs no torchrec itself.

    level:  task t's experts (its state) ──┬─ mixed by t's gate (its state) ─> next state of t
            shared experts (shared state) ─┴─ all experts, mixed by the shared gate ─> next shared state
    the first states are the joined inputs; a task's last state ─> its tower ─> its logit

The last level has no shared gate, because nothing reads it.

Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized
Recommendations", RecSys 2020. Form: the paper's; in FuxiCTR's the shared gate mixes the shared experts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bagpipe.models.layers import mlp, pooled_width
from bagpipe.models.tasks import joined_inputs, loss_and_outputs, mix

__all__ = ["PLE", "Level"]


class Level(nn.Module):
    """One level of experts and gates.

    Args:
        width: of all states that it reads.
        num_tasks: number of tasks.
        task_experts, shared_experts: experts of each task, and shared ones.
        expert_mlp: widths of an expert; the last is that of the new states.
        is_last: there is no new shared state.
        layers: dropout and batch norm of `mlp`.
    """

    def __init__(
        self,
        width: int,
        num_tasks: int,
        *,
        task_experts: int,
        shared_experts: int,
        expert_mlp: Sequence[int],
        is_last: bool,
        layers: Mapping[str, Any],
    ) -> None:
        super().__init__()

        def experts(number: int) -> nn.ModuleList:
            return nn.ModuleList(mlp([width, *expert_mlp], **layers) for _ in range(number))

        self.of_tasks = nn.ModuleList(experts(task_experts) for _ in range(num_tasks))
        self.shared = experts(shared_experts)
        self.gates = nn.ModuleList(nn.Linear(width, task_experts + shared_experts) for _ in range(num_tasks))
        self.shared_gate = None if is_last else nn.Linear(width, num_tasks * task_experts + shared_experts)

    def forward(self, states: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tasks' new states, and the new shared one; the last level returns the old one."""
        common = [expert(shared) for expert in self.shared]
        of_tasks: Any = self.of_tasks
        own = [[expert(state) for expert in experts] for experts, state in zip(of_tasks, states, strict=True)]
        mixed = [
            mix(gate(state), [*outputs, *common]) for gate, state, outputs in zip(self.gates, states, own, strict=True)
        ]
        if self.shared_gate is not None:
            shared = mix(self.shared_gate(shared), [*(output for outputs in own for output in outputs), *common])
        return mixed, shared


class PLE(nn.Module):
    """``model(batch)`` returns the loss and a dict of tasks -> probabilities ``[n]``; batches as in `tasks`.

    Args:
        embedding_bag_collection: maps ``batch["sparse"]`` to a KeyedTensor.
        tasks: task, the key of its labels in a batch -> its weight in the loss.
        num_dense: number of dense columns.
        num_levels: number of levels.
        task_experts, shared_experts: experts of each task, and shared ones, in a level.
        expert_mlp: widths of an expert.
        tower_mlp: widths of a task's tower before its logit.
        dropout, batch_norm: of all hidden layers; see `bagpipe.models.layers.mlp`.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        tasks: Mapping[str, float],
        num_dense: int = 0,
        num_levels: int = 2,
        task_experts: int = 2,
        shared_experts: int = 2,
        expert_mlp: Sequence[int] = (64, 32),
        tower_mlp: Sequence[int] = (32,),
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings, self.tasks, self.num_dense = embedding_bag_collection, dict(tasks), num_dense
        width = pooled_width(embedding_bag_collection) + num_dense
        layers: dict[str, Any] = {"dropout": dropout, "batch_norm": batch_norm}
        self.levels = nn.ModuleList(
            Level(
                expert_mlp[-1] if number else width,
                len(tasks),
                task_experts=task_experts,
                shared_experts=shared_experts,
                expert_mlp=expert_mlp,
                is_last=number == num_levels - 1,
                layers=layers,
            )
            for number in range(num_levels)
        )
        self.towers = nn.ModuleList(mlp([expert_mlp[-1], *tower_mlp], outputs=1, **layers) for _ in tasks)

    def logits(self, dense: Tensor | None, sparse: Any) -> tuple[Tensor, ...]:
        """Logits ``[n]`` of every task."""
        shared = joined_inputs(self.embeddings, dense, sparse, self.num_dense)
        states = [shared] * len(self.tasks)
        for level in self.levels:
            states, shared = level(states, shared)
        return tuple(tower(state).squeeze(1) for state, tower in zip(states, self.towers, strict=True))

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_and_outputs(self.logits(batch.get("dense"), batch["sparse"]), self.tasks, batch)
