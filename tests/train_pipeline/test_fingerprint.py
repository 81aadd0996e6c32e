"""A batch that changes between its reading and its training is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from bagpipe.errors import InputError
from bagpipe.train_pipeline.fingerprint import fingerprint_of
from tests.train_pipeline.small import EXAMPLES, FEATURES, batches, pipeline


def _kinds() -> dict[str, Any]:
    """Tensors of many kinds, in containers."""
    return {
        "float": torch.arange(5000.0),
        "half": [torch.ones(3, dtype=torch.bfloat16), torch.ones((), dtype=torch.bool)],
        "grad": SimpleNamespace(weight=torch.nn.Parameter(torch.ones(2, 3))),
        "array": (np.ones((4, 4)), np.zeros(0), torch.zeros(0)),
        "passed over": (torch.ones(3, 4).T, torch.ones(2, device="meta")),
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "text": ["a", b"b", None, 3, np.array(["x", None], dtype=object)],
        "ids": batches(1)[0]["ids"],
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch["float"].add_(1),
        lambda batch: batch["float"][-1:].zero_(),
        lambda batch: batch["half"][0].zero_(),
        lambda batch: batch["half"][1].zero_(),
        lambda batch: batch["grad"].weight.data.zero_(),
        lambda batch: batch["array"][0].fill(2),
        lambda batch: batch["complex"].zero_(),
        lambda batch: batch["ids"].values().add_(1),
        lambda batch: batch["ids"].lengths().add_(1),
    ],
)
def test_a_change_of_any_kind_of_tensor_is_noticed(change: Callable[[Any], object]) -> None:
    batch = _kinds()
    before = fingerprint_of(batch)
    assert fingerprint_of(batch) == before == fingerprint_of(_kinds())
    change(batch)
    assert fingerprint_of(batch) != before


def _by_torch() -> Iterator[Any]:
    """One buffer for all batches."""
    buffer = {"ids": torch.empty(3 * EXAMPLES, dtype=torch.int64), "labels": torch.empty(EXAMPLES)}
    lengths = torch.ones(3 * EXAMPLES, dtype=torch.int64)
    for number in range(10):
        buffer["ids"].fill_(number)
        buffer["labels"].fill_(number)
        ids = KeyedJaggedTensor(keys=list(FEATURES), values=buffer["ids"], lengths=lengths)
        yield {"ids": ids, "labels": buffer["labels"]}


def _labels_by_numpy() -> Iterator[Any]:
    """Ids of their own, labels in one array."""
    labels = np.empty(EXAMPLES, dtype=np.float32)
    for number, batch in enumerate(batches(10)):
        labels.fill(number)
        yield {"ids": batch["ids"], "labels": torch.from_numpy(labels)}


@pytest.mark.parametrize("loader", [_by_torch, _labels_by_numpy])
def test_a_loader_that_fills_one_buffer_is_refused(loader: Callable[[], Iterator[Any]]) -> None:
    with pipeline() as trained:
        with pytest.raises(InputError, match=r"^batch 0 has changed since the iterator yielded it"):
            list(trained.train(loader()))
        assert trained.step == 0


def test_one_batch_may_come_again_and_again() -> None:
    batch = batches(1)[0]
    with pipeline() as trained:
        list(trained.train([batch] * 10))
        assert trained.step == 10
