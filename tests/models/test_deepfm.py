"""`DeepFM` against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bagpipe.models.deepfm import DeepFM
from tests.models.comparison import Bags, assert_same_step, click_batch
from tests.models.plain_fuxictr import PlainDeepFM

DIMS = {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("num_dense", [0, 2])
def test_it_equals_the_formula(batch_norm: bool, num_dense: int) -> None:
    dense, sparse, labels = click_batch(list(DIMS), num_dense)
    model = DeepFM(Bags(DIMS), num_dense=num_dense, dim=4, hidden=(6, 3), batch_norm=batch_norm)
    plain = PlainDeepFM(Bags(DIMS), num_dense, 4, (6, 3), norm=batch_norm)
    assert_same_step(
        model, plain, lambda module: F.binary_cross_entropy_with_logits(module(dense, sparse).squeeze(1), labels)
    )


def test_terms_by_hand() -> None:
    """Two fields of dimension 1 without an MLP's part: bias + w1 + w2 + v1 v2."""
    _, sparse, _ = click_batch(["a", "b"], 0, num_examples=1)
    model = DeepFM(Bags({"a": 2, "b": 2}), num_dense=0, dim=1, hidden=(1,)).double()
    for parameter in model.deep.parameters():
        parameter.data.zero_()
    model.bias.data.fill_(0.5)
    for table, row in zip(model.embeddings.tables, ([3.0, 2.0], [5.0, 7.0]), strict=True):
        table.weight.data[:] = torch.tensor(row)
    counts = sparse.lengths().tolist()
    expected = 0.5 + 3 * counts[0] + 5 * counts[1] + 14 * counts[0] * counts[1]
    assert model(torch.zeros(1, 0).double(), sparse).item() == expected
