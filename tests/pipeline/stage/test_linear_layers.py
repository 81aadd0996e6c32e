from __future__ import annotations

import torch
from torch import Tensor, nn

from bagpipe.partition.operators import Linear
from bagpipe.pipeline.stage.linear_layers import linear_layer
from bagpipe.split.split import trace_parts
from tests.split.whole_models import NUM_DENSE, library_model


def layers_of(name: str) -> dict[str, Linear | None]:
    parts = trace_parts(library_model(name), num_dense=NUM_DENSE, dtype=torch.float64)
    return {item.name: linear_layer(parts, item) for item in parts.operators}


def test_layers_of_dlrm():
    found = layers_of("dlrm")
    assert found["over_arch.model.0._mlp.1._linear"] == Linear(weight_bytes=8 * 7 * 5, input_bytes=56, output_bytes=40)
    assert {name for name, layer in found.items() if layer is None} == {
        "inter_arch.cat_1",
        "inter_arch.bmm",
        "inter_arch.cat_2",
    }


def test_what_follows_the_product_decides_on_columns():
    """The bottom layers of DCNv2 end with a move, the cross layers have functions instead of modules."""
    found = layers_of("dcnv2")
    bottom, cross = found["dense_arch.model._mlp.2._linear"], found["inter_arch.crossnet.linear"]
    assert bottom is not None
    assert (bottom.columns, bottom.rows) == (False, True)
    assert cross is not None
    assert (cross.columns, cross.rows) == (True, True)


class Model(nn.Module):
    """Layers behind a concatenation, before a softmax, and with two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 4), nn.Linear(8, 4), nn.Bilinear(4, 4, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        values = torch.softmax(self.first(dense), dim=1)
        values = self.second(torch.cat([values, values], dim=1))
        result: Tensor = self.third(values, values)
        return result


def test_other_operators():
    parts = trace_parts(Model(), num_dense=2, dtype=torch.float32)
    found = {item.name: linear_layer(parts, item) for item in parts.operators}
    first = found["first"]
    assert first is not None
    assert (first.columns, first.rows) == (False, True)
    assert found["third"] is None
