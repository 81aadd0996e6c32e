"""Loops over a loader: nothing is left out without a word."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from bagpipe.errors import InputError
from tests.train_pipeline.small import FEATURES, batches, pipeline


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_a_loop_that_nobody_iterates_says_so(call: str) -> None:
    with pipeline() as trained:
        with pytest.warns(RuntimeWarning, match=rf"pipeline\.{call}\(loader\) was not iterated, so no batch"):
            getattr(trained, call)(batches(2))
        assert trained.step == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(getattr(trained, call)(batches(2)))) == 2
            next(getattr(trained, call)(batches(2)))
            getattr(trained, call)(batches(2)).close()


@pytest.mark.parametrize("loader", [None, True, 3, torch.utils.data.IterableDataset])
@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_what_cannot_be_iterated_is_refused_at_once(call: str, loader: Any) -> None:
    with pipeline() as trained, pytest.raises(InputError, match=f"{call} needs a loader, an iterable of batches, got"):
        getattr(trained, call)(loader)


def test_the_mode_of_the_model_is_set_at_the_model() -> None:
    with pipeline() as trained, pytest.raises(InputError, match=r"pipeline\.model\.train\(\) sets the mode"):
        trained.train()


class _Indexed:
    """An iterable by its indices alone, as a torch Dataset is."""

    def __init__(self) -> None:
        self.batches = batches(2)

    def __getitem__(self, number: int) -> Any:
        return self.batches[number]


def test_a_loader_can_be_one_by_its_indices() -> None:
    with pipeline() as trained:
        assert len(list(trained.train(_Indexed()))) == 2  # type: ignore[arg-type]


def test_errors_of_a_loop_are_in_the_words_of_arguments() -> None:
    with pipeline(cache_rows=1) as trained, pytest.raises(InputError, match="cache_rows"):
        list(trained.train(batches(2)))


def test_an_evaluation_has_as_many_outputs_as_batches() -> None:
    none = torch.empty(0, dtype=torch.int64)
    empty = {
        "ids": KeyedJaggedTensor(keys=list(FEATURES), values=none, lengths=none, stride=0),
        "labels": torch.empty(0),
    }
    first, last = batches(2)
    with pipeline() as trained:
        outputs = list(trained.evaluate([empty, first, empty, last, empty]))
        expected = list(trained.evaluate([first, last]))
    assert [len(each) == 0 for each in outputs] == [True, False, True, False, True]
    assert torch.equal(outputs[1], expected[0])
    assert torch.equal(outputs[3], expected[1])
