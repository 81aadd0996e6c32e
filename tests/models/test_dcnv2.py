"""`DCNv2` against its formula, and its size against the published one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bagpipe.models.dcnv2 import CrossLayers, DCNv2
from tests.models.comparison import Bags, assert_same_step, click_batch
from tests.models.plain_fuxictr import PlainDCNv2

DIMS = {"a": 3, "b": 3, "c": 5}


def test_a_cross_layer_by_hand() -> None:
    """x0 = (2, 3), W = ((1, 2), (0, 1)), b = (1, 0): x1 = x0 + x0 * (2 + 6 + 1, 3) = (20, 12), and again."""
    cross = CrossLayers(2, 2).double()
    for layer in cross.layers:
        layer.weight.data = torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double()
        layer.bias.data = torch.tensor([1.0, 0.0]).double()
    # second: (20, 12) + (2, 3) * (20 + 24 + 1, 12)
    assert cross(torch.tensor([[2.0, 3.0]]).double()).tolist() == [[110.0, 48.0]]


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("num_dense", [0, 2])
def test_it_equals_the_formula(structure: str, batch_norm: bool, num_dense: int) -> None:
    dense, sparse, labels = click_batch(list(DIMS), num_dense)
    model = DCNv2(
        Bags(DIMS),
        num_dense=num_dense,
        dim=4,
        hidden=(6, 5),
        cross_layers=2,
        structure=structure,  # type: ignore[arg-type] # a parameter of the test
        batch_norm=batch_norm,
    )
    plain = PlainDCNv2(Bags(DIMS), num_dense, 4, (6, 5), num_layers=2, stacked=structure == "stacked", norm=batch_norm)
    assert_same_step(
        model, plain, lambda module: F.binary_cross_entropy_with_logits(module(dense, sparse).squeeze(1), labels)
    )


def test_dropout_is_of_training_alone() -> None:
    dense, sparse, _ = click_batch(list(DIMS), 2)
    model = DCNv2(Bags(DIMS), num_dense=2, dim=4, hidden=(50,), dropout=0.5).double()
    assert not torch.equal(model(dense, sparse), model(dense, sparse))
    model.eval()
    assert torch.equal(model(dense, sparse), model(dense, sparse))
