"""Shared parts of the models with several labels."""

from __future__ import annotations

from typing import Any

import torch

from bagpipe.models.tasks import joined_inputs, mix, weighted_loss
from tests.models.comparison import Bags, click_batch

DIMS = {"a": 3, "b": 2}


def task_batch(*tasks: str, num_dense: int = 2, weighted: bool = True) -> dict[str, Any]:
    """A batch with labels of all tasks."""
    dense, sparse, _ = click_batch(list(DIMS), num_dense)
    draw = torch.Generator().manual_seed(3)
    batch = {"sparse": sparse, **{task: torch.randint(0, 2, (6,), generator=draw).double() for task in tasks}}
    if num_dense:
        batch["dense"] = dense
    if weighted:
        batch["weight"] = torch.rand(6, generator=draw, dtype=torch.float64)
    return batch


def test_the_inputs_are_vectors_then_dense_columns() -> None:
    bags, batch = Bags(DIMS), task_batch("buy")
    vectors = bags(batch["sparse"]).values()
    assert torch.equal(
        joined_inputs(bags, batch["dense"], batch["sparse"], 2), torch.cat([vectors, batch["dense"]], dim=1)
    )
    assert torch.equal(joined_inputs(bags, None, batch["sparse"], 0), vectors)


def test_a_mixture_by_hand() -> None:
    """Shares 1/4 and 3/4."""
    gate = torch.tensor([[1.0, 3.0]]).log()
    mixed = mix(gate, [torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 8.0]])])
    torch.testing.assert_close(mixed, torch.tensor([[1.0, 6.0]]))


def test_weights_of_examples_scale_their_losses() -> None:
    logits, labels = torch.zeros(2), torch.tensor([0.0, 1.0])
    half = weighted_loss(logits, labels, {"weight": torch.tensor([1.0, 0.0])})
    torch.testing.assert_close(2 * half, weighted_loss(logits, labels, {}))
