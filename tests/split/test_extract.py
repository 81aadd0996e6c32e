from __future__ import annotations

import torch
from torch import Tensor, nn

from bagpipe.split.extract import extract
from bagpipe.split.split import trace_parts


class Shapes(nn.Module):
    """Results of every shape: a number, a vector, a matrix per example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        vector = self.layer(dense)
        matrix = vector.view(len(dense), 2, 3)
        number = matrix.sum((1, 2))
        return (matrix * number.view(-1, 1, 1)).sum(2) + vector[:, :2]


def test_bundles_round_trip() -> None:
    model = Shapes()
    parts = trace_parts(model, num_dense=3, dtype=torch.float32)
    nodes = {node.name: node for node in parts.dense_nodes}
    bundle = (nodes["layer"], nodes["view"], nodes["sum_1"])
    before = [node for node in parts.dense_nodes if node in bundle]
    after = [node for node in parts.dense_nodes if node not in bundle]
    first = extract(parts, "First", before, [(parts.dense,)], [bundle])
    second = extract(parts, "Second", after, [bundle], [(parts.heads[0],)])
    assert first.layer is model.layer
    dense = torch.randn(4, 3)
    (packed,) = first(dense)
    assert packed.shape == (4, 6 + 6 + 1)
    (result,) = second(packed)
    assert torch.equal(result, model(dense, None))
    assert list(second.parameters()) == []
