from __future__ import annotations

import dataclasses

import torch

from tests.trainer.schemas import schema_of
from trainer.tasks import Tasks


def test_targets_are_split_into_labels_and_weights() -> None:
    schema = dataclasses.replace(schema_of(None), label=("click", "buy"), example_weight="w")
    tasks = Tasks.of(schema)
    assert tasks == Tasks(labels=("click", "buy"), is_weighted=True)
    logits, targets = torch.rand(4, 2), torch.rand(4, 3)
    found, labels, weights = tasks.split(logits, targets)
    assert weights is not None
    assert torch.equal(found, logits)
    assert torch.equal(torch.cat([labels, weights[:, None]], dim=1), targets)
    assert (tasks.loss.num_labels, tasks.loss.is_weighted) == (2, True)


def test_one_label_is_a_column() -> None:
    tasks = Tasks.of(schema_of(None))
    logits, labels, weights = tasks.split(torch.rand(4), torch.ones(4))
    assert (logits.shape, labels.shape, weights) == ((4, 1), (4, 1), None)
