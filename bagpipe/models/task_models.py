"""Models with several labels by name, called as ``model(dense, sparse)``: one logit for each label of the data.

    model.* keys, bags ──TASK_MODELS──> MMoE, PLE, ESMM ──TaskLogits──> logits, in the order of the labels

Widths: ``bottom_mlp`` of an expert, ``top_mlp`` of a tower. The heads of ESMM are clicks, and clicks with a conversion;
the second label must be the latter: 1 only if the first one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bagpipe.config.model_section import ModelConfig
from bagpipe.errors import InputError
from bagpipe.models.esmm import ESMM
from bagpipe.models.mmoe import MMoE
from bagpipe.models.ple import PLE
from bagpipe.types.schema import DataSchema

__all__ = ["TASK_MODELS", "TaskLogits", "build_task_model"]


class TaskLogits(nn.Module):
    """``model(dense, sparse)`` returns the logits ``[n]`` of every label.

    Args:
        model: has ``logits(dense, sparse)``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, dense: Tensor, sparse: Any) -> tuple[Tensor, ...]:
        logits: tuple[Tensor, ...] = self.model.logits(dense, sparse)
        return logits


def _towers(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    """Arguments of every model."""
    config.check_widths("top_mlp")
    return {
        "num_dense": len(schema.dense),
        "tower_mlp": config.top_mlp,
        "dropout": config.dropout,
        "batch_norm": config.batch_norm,
    }


def _experts(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    """Arguments of the models with experts, whose tasks weigh the same."""
    config.check_widths("bottom_mlp")
    return {
        "tasks": dict.fromkeys(schema.labels, 1.0),
        "expert_mlp": config.bottom_mlp,
        **_towers(schema, config),
    }


def _mmoe(bags: nn.Module, schema: DataSchema, config: ModelConfig) -> nn.Module:
    return MMoE(bags, num_experts=config.experts, gate_mlp=config.gate_mlp, **_experts(schema, config))


def _ple(bags: nn.Module, schema: DataSchema, config: ModelConfig) -> nn.Module:
    return PLE(
        bags,
        num_levels=config.levels,
        task_experts=config.task_experts,
        shared_experts=config.experts,
        **_experts(schema, config),
    )


def _esmm(bags: nn.Module, schema: DataSchema, config: ModelConfig) -> nn.Module:
    arguments = _towers(schema, config)
    if len(schema.labels) != 2:
        raise InputError(
            f"model.name esmm needs data with two labels, clicks and conversions, got {', '.join(schema.labels)}"
        )
    return ESMM(bags, click=schema.labels[0], conversion=schema.labels[1], **arguments)


#: By `model.name`.
TASK_MODELS: Mapping[str, Callable[[nn.Module, DataSchema, ModelConfig], nn.Module]] = {
    "mmoe": _mmoe,
    "ple": _ple,
    "esmm": _esmm,
}


def build_task_model(bags: nn.Module, schema: DataSchema, config: ModelConfig) -> TaskLogits:
    """The model of a name in `TASK_MODELS`.

    Args:
        bags: maps a KeyedJaggedTensor to a KeyedTensor.
        schema: its labels are the tasks.
        config: names and sizes.

    Raises:
        InputError: the model is not one of these widths or labels.
    """
    return TaskLogits(TASK_MODELS[config.name](bags, schema, config))
