"""Executors of a batch: equal results, and the losses they accept."""

from __future__ import annotations

import pytest
import torch

from bagpipe.dense.executor import EagerExecutor, SplitExecutor
from bagpipe.dense.loss import BCE, as_heads
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import prepared
from tests.dense.small import BFLOAT16, model_of, train, whole


@pytest.mark.parametrize(
    ("name", "precision"), [("dlrm", BFLOAT16), ("deepfm", Precision())], ids=["bfloat16", "float32"]
)
def test_a_model_apart_from_its_lookups_computes_the_same_bits(name: str, precision: Precision) -> None:
    model = model_of(name)
    expected = train(model, EagerExecutor(model, precision))
    model = model_of(name)
    losses, state = train(model, SplitExecutor(prepared(whole(model, precision), precision), precision))
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def test_autocast_changes_the_numbers_but_not_by_much() -> None:
    model = model_of("dlrm")
    plain, _ = train(model, EagerExecutor(model))
    model = model_of("dlrm")
    half, _ = train(model, EagerExecutor(model, BFLOAT16))
    assert plain != half
    assert half == pytest.approx(plain, rel=1e-2)


def test_a_loss_is_computed_in_the_labels_dtype() -> None:
    logits, labels = torch.linspace(-3, 3, 7).bfloat16(), torch.ones(7)
    loss = BCE.summed(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, BCE.summed(logits.float(), labels))


def test_losses_of_heads_are_summed() -> None:
    labels = torch.tensor([0.0, 1.0])
    heads = as_heads([torch.zeros(2, 1), torch.ones(2)])
    assert [tuple(head.shape) for head in heads] == [(2,), (2,)]
    assert torch.equal(BCE.total(heads, labels), BCE.summed(heads[0], labels) + BCE.summed(heads[1], labels))
    assert len(as_heads(torch.zeros(2, 1))) == 1
