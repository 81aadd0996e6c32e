"""`ModelConfig`: the keys of the model, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bagpipe.config.ranges import BELOW_1, WIDTHS, at_least, matching

__all__ = ["Model", "ModelConfig", "Structure"]

Model = Literal["dlrm", "dcnv2", "deepfm", "wide-deep", "towers", "dcnv2-fuxictr", "deepfm-fuxictr", "finalmlp"]
Structure = Literal["parallel", "stacked"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model.

    Attributes:
        name: model of the zoo.
        embedding_dim: weights per row, unless the schema gives the table's dim.
        bottom_mlp: widths of the dense (bottom) tower.
        top_mlp: widths of the top tower, before the final logit. Of dcnv2-fuxictr and deepfm-fuxictr: of their MLP; of
            finalmlp bottom_mlp and top_mlp are the two streams.
        dropout: share of each hidden layer's values that training zeroes; of the models from FuxiCTR.
        batch_norm: batch norm in each hidden layer, over the examples of a rank; of the models from FuxiCTR.
        cross_layers: cross layers of dcnv2 and dcnv2-fuxictr.
        structure: dcnv2-fuxictr's MLP is beside the cross layers (parallel) or behind them (stacked).
        heads: slices of finalmlp's bilinear form; a divisor of the last widths of both streams.
        gate_mlp: hidden widths of finalmlp's feature gates; empty: no gates.
        first_gate: features and dense columns that the first stream's gate reads, separated by commas; empty: none.
        second_gate: the same of the second stream.
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
    factory: Annotated[str, matching(r"|[\w.]+:[\w.]+", 'empty or "module:function"')] = ""

    def gate_context(self, key: str) -> tuple[str, ...]:
        """Columns that gate ``first_gate`` or ``second_gate`` reads; none without gates."""
        text: str = getattr(self, key) if self.gate_mlp else ""
        return tuple(name.strip() for name in text.split(",") if name.strip())
