"""Models of users: what is taken from them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as in_backward

import bagpipe
from bagpipe.errors import InputError
from tests.train_pipeline.small import RATE, Small, assert_same, batches, pipeline, progress_all, state_of


def test_a_model_without_collections_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(InputError, match="EmbeddingBagCollection or EmbeddingCollection, Linear has none"):
        bagpipe.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), rows=bagpipe.optim.SGD(0.1))


def test_collections_full_of_weights_are_refused() -> None:
    with pytest.raises(InputError, match=r"tables \['t_f0', 't_f1', 't_f2'\] hold weights on cpu"):
        pipeline(Small("cpu"))


def test_row_optimizers_must_be_given_once() -> None:
    with pytest.raises(InputError, match="expected rows=, the row optimizer"):
        pipeline(rows=None)


def test_the_optimizer_in_backward_of_the_weights_is_that_of_the_rows() -> None:
    model = Small()
    in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": RATE, "eps": 1e-10})
    with pipeline(model, rows=None) as trained:
        progress_all(trained, iter(batches(5)))
        found = state_of(trained)
    with pipeline() as trained:
        progress_all(trained, iter(batches(5)))
        assert_same(found, state_of(trained))


def test_tables_named_unbounded_take_any_id() -> None:
    many = batches(3)
    many[1]["ids"].values()[0] = -5
    with pipeline(unbounded="*") as trained:
        progress_all(trained, iter(many))
        assert -5 in trained.rows("t_f0").ids()
    with pytest.raises(InputError, match="unbounded names table 'other'"):
        pipeline(unbounded=("other",))
