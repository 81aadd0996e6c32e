"""`ModelConfig`: the keys of the model, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bagpipe.config.ranges import ABOVE_0, BELOW_1, WEIGHTS, WIDTHS, Range, at_least, matching
from bagpipe.errors import InputError

__all__ = ["LossName", "Model", "ModelConfig", "Structure"]

Model = Literal[
    "dlrm",
    "dcnv2",
    "deepfm",
    "wide-deep",
    "towers",
    "dcnv2-fuxictr",
    "deepfm-fuxictr",
    "finalmlp",
    "mmoe",
    "ple",
    "esmm",
]
Structure = Literal["parallel", "stacked"]
LossName = Literal["bce", "weighted_bce", "focal"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model.

    Attributes:
        name: model of the zoo.
        embedding_dim: weights per row, unless the schema gives the table's dim.
        bottom_mlp: widths of the dense (bottom) tower.
        top_mlp: widths of the top tower, before the final logit. Of dcnv2-fuxictr and deepfm-fuxictr: of their MLP; of
            finalmlp bottom_mlp and top_mlp are the two streams; of mmoe and ple bottom_mlp is an expert, top_mlp a
            label's tower; of esmm top_mlp is a tower.
        dropout: share of each hidden layer's values that training zeroes; of the models from FuxiCTR and of several
            labels.
        batch_norm: batch norm in each hidden layer, over the examples of a rank; of the same models.
        cross_layers: cross layers of dcnv2 and dcnv2-fuxictr.
        structure: dcnv2-fuxictr's MLP is beside the cross layers (parallel) or behind them (stacked).
        heads: slices of finalmlp's bilinear form; a divisor of the last widths of both streams.
        gate_mlp: hidden widths of finalmlp's feature gates; empty: no gates. Of mmoe: hidden widths of a label's gate.
        first_gate: features and dense columns that the first stream's gate reads, separated by commas; empty: none.
        second_gate: the same of the second stream.
        experts: experts that all labels share; of ple, in each level.
        task_experts: experts of each label, in each level of ple.
        levels: levels of ple.
        loss: of the logits, in training: binary cross-entropy (bce), with pos_weight (weighted_bce), or focal. Metrics
            are always of the plain labels and bce.
        loss_weights: factors of the losses of the model's logits, in the order of the labels; empty: 1 each.
        label_smoothing: share s of a label y that is replaced by 1/2: y * (1 - s) + s / 2.
        pos_weight: factor of the loss of positive examples, of weighted_bce.
        focal_gamma: exponent of focal; 0 or at least 1.
        focal_alpha: weight of positive examples in focal, 1 - focal_alpha is that of negative ones; 0: equal weights.
        factory: "module:function" that returns a model of the user's own; overrides name.
    """

    name: Model = "dlrm"
    embedding_dim: Annotated[int, at_least(1)] = 16
    bottom_mlp: Annotated[tuple[int, ...], WIDTHS] = (64, 32)
    top_mlp: Annotated[tuple[int, ...], WIDTHS] = (128, 64)
    dropout: Annotated[float, BELOW_1] = 0.0
    batch_norm: bool = False
    # As in MLPerf's DLRM-DCNv2 reference and FuxiCTR's DCNv2.
    cross_layers: Annotated[int, at_least(1)] = 3
    structure: Structure = "parallel"
    heads: Annotated[int, at_least(1)] = 1
    gate_mlp: Annotated[tuple[int, ...], WIDTHS] = ()
    first_gate: str = ""
    second_gate: str = ""
    experts: Annotated[int, at_least(1)] = 4  # as in FuxiCTR's MMoE
    task_experts: Annotated[int, at_least(1)] = 2
    levels: Annotated[int, at_least(1)] = 2
    loss: LossName = "bce"
    loss_weights: Annotated[tuple[float, ...], WEIGHTS] = ()
    label_smoothing: Annotated[float, BELOW_1] = 0.0
    pos_weight: Annotated[float, ABOVE_0] = 1.0
    focal_gamma: Annotated[float, Range("0 or at least 1", lambda value: value == 0 or value >= 1)] = 2.0
    focal_alpha: Annotated[float, BELOW_1] = 0.25  # as torchvision's sigmoid_focal_loss
    factory: Annotated[str, matching(r"|[\w.]+:[\w.]+", 'empty or "module:function"')] = ""

    def gate_context(self, key: str) -> tuple[str, ...]:
        """Columns that gate ``first_gate`` or ``second_gate`` reads; none without gates."""
        text: str = getattr(self, key) if self.gate_mlp else ""
        return tuple(name.strip() for name in text.split(",") if name.strip())

    def check_widths(self, *keys: str) -> None:
        """Raise InputError if the model has no width under one of the keys ``bottom_mlp`` and ``top_mlp``."""
        for key in keys:
            if not getattr(self, key):
                raise InputError(f"model.{key}: model {self.name} needs at least one width, got none")
