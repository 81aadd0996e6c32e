"""Words of a record, by hand."""

from __future__ import annotations

import pytest

from bagpipe.types.row_record import FROZEN, OPTIMIZER_STATE_WIDTH, ROW_TYPES, base_optimizer


@pytest.mark.parametrize(
    ("dtype", "dim", "optimizer", "words"),
    [
        ("float32", 5, "sgd", 5),
        ("float32", 5, "adam_decayed", 5 + 10 + 1),
        ("float16", 5, "adagrad", 6 + 2 * 5),  # one half pads the weights; state is float32
        ("float64", 5, FROZEN, 5),
    ],
)
def test_words_of_a_record(dtype: str, dim: int, optimizer: str, words: int) -> None:
    assert ROW_TYPES[dtype].record_words(dim, optimizer) == words


def test_optimizers_with_decay_are_those_without_it_and_a_step() -> None:
    for name, width in OPTIMIZER_STATE_WIDTH.items():
        base, decays = base_optimizer(name)
        assert width(7) == OPTIMIZER_STATE_WIDTH[base](7) + decays
