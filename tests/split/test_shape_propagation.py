from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.split.shape_propagation import NodeShape, propagate_shapes, rows_of
from bagpipe.split.trace import trace


def shapes_of(model: nn.Module, num_dense: int = 4) -> dict[str, NodeShape]:
    return {
        node.name: shape
        for node, shape in propagate_shapes(trace(model), num_dense=num_dense, dtype=torch.float32).items()
    }


class Shapes(nn.Module):
    """Tensors with and without example dimension, a list, and numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        hidden = self.norm(self.layer(dense)) * self.scale
        pairs = hidden.reshape(2 * dense.shape[0], -1)
        left, right = hidden.detach().chunk(2, dim=1)
        joined = (left * right).view(len(dense), dense.size(1) - 1)
        return (joined + pairs.view(joined.size(0), -1)[:, :3]).sum(1) * hidden.dim()


def test_every_node_is_described() -> None:
    model = Shapes()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shapes = shapes_of(model)
    assert shapes["layer"] == NodeShape(
        is_tensor=True, by_example=True, shape=(6,), dtype=torch.float32, wants_grad=True
    )
    assert shapes["reshape"] == NodeShape(is_tensor=True, shape=(4, 3), dtype=torch.float32, wants_grad=True)
    assert shapes["chunk"] == NodeShape()
    assert not shapes["view"].wants_grad
    assert shapes["dense"].elements == 4
    assert not shapes["scale"].by_example
    assert not any(name.startswith(("getattr", "size", "dim")) for name in shapes), "numbers are folded"
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_folded_numbers_follow_the_batch() -> None:
    model = Shapes().eval()
    traced = trace(model)
    propagate_shapes(traced, num_dense=4, dtype=torch.float32)
    assert any(node.target is rows_of for node in traced.graph.nodes)
    dense = torch.randn(7, 4)
    traced.module.eval()
    assert torch.equal(traced.module(dense, None), model(dense, None))


class Fails(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.how = how

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        hidden = self.layer(dense)
        if self.how == "square":
            hidden = hidden.new_zeros(len(dense) ** 2)
        if self.how == "inverse":
            hidden = hidden * (1 / dense.size(0))
        return hidden


@pytest.mark.parametrize(
    ("how", "num_dense", "words"),
    [
        ("", 4, r"layer: cannot run on 2 fake examples \(mat1 and mat2 shapes"),
        ("square", 3, r"pow.*computes with the number of examples.*got \[4, 9, 25\] for \[2, 3, 5\]"),
        ("inverse", 3, "computes with the number of examples"),
    ],
)
def test_models_that_fail_on_fake_batches_are_refused(how: str, num_dense: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        shapes_of(Fails(how), num_dense)
