"""Ids found in users' batches: containers, orders, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from bagpipe.errors import InputError
from bagpipe.train_pipeline.batch_ids import BatchIds, hash_of
from tests.train_pipeline.small import DIM, assert_same, batches, pipeline, progress_all

with warnings.catch_warnings():  # torchrec warns about itself
    warnings.simplefilter("ignore")
    from torchrec.datasets.utils import Batch as TorchrecBatch

NUM_EXAMPLES = 3


def jagged(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(bags),
        values=torch.tensor([i for key in bags for bag in bags[key] for i in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for key in bags for bag in bags[key]], dtype=torch.int64),
    )


BAGS = {"a": [[1], [], [2, 3]], "b": [[4, 4], [5], []], "c": [[], [6], [7]]}


@dataclass
class Data:
    ids: Any
    labels: Any


def _split() -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    return jagged({"c": BAGS["c"], "unused": [[9], [9], [9]]}), jagged({"b": BAGS["b"], "a": BAGS["a"]})


@pytest.mark.parametrize(
    "batch",
    [
        jagged(BAGS),
        {"x": jagged(BAGS), "labels": torch.zeros(3)},
        (torch.zeros(3), jagged(BAGS)),
        Data(ids=jagged(BAGS), labels=None),
        SimpleNamespace(inner={"deep": [jagged(BAGS)]}),
        TorchrecBatch(torch.zeros(3, 1), jagged(BAGS), torch.zeros(3)),
        [*_split()],
        {"users": _split()[0], "items": _split()[1], "name": "text"},
    ],
    ids=["jagged", "dict", "tuple", "dataclass", "object", "torchrec", "two", "two in a dict"],
)
def test_ids_are_found_in_any_container(batch: Any) -> None:
    found = BatchIds(("a", "b", "c")).of(batch, 7)
    assert found.index == 7
    assert found.lengths.tolist() == [[1, 0, 2], [2, 1, 0], [0, 1, 1]]
    assert found.values.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]
    assert found.num_examples == NUM_EXAMPLES


@given(st.permutations(["a", "b", "c"]), st.data())
def test_any_order_of_keys_gives_the_same_ids_and_hash(order: list[str], data: st.DataObject) -> None:
    bags = {
        key: data.draw(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), min_size=2, max_size=2))
        for key in "abc"
    }
    ids = BatchIds(("a", "b", "c"))
    one, other = ids.of(jagged(bags), 0), ids.of(jagged({key: bags[key] for key in order}), 0)
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(one.lengths, other.lengths)
    assert hash_of(one) == hash_of(other)


def test_hashes_tell_ids_and_their_places_apart() -> None:
    ids = BatchIds(("a",))
    bags: list[list[list[int]]] = [[[1], [2]], [[2], [1]], [[1, 2], []], [[], [1, 2]], [[1], [3]]]
    assert len({hash_of(ids.of(jagged({"a": bag}), 0)) for bag in bags}) == len(bags)


def test_a_function_can_give_the_ids() -> None:
    ids = BatchIds(("a", "b", "c"), lambda batch: jagged(batch))
    assert ids.of(BAGS, 0).values.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.zeros(3)}, "batch 4: expected KeyedJaggedTensors in it, found none in a dict"),
        (jagged({"a": BAGS["a"], "b": BAGS["b"]}), r"feature 'c' is missing, it has \['a', 'b'\]"),
        ((jagged(BAGS), jagged({**BAGS, "a": BAGS["b"]})), "key 'a' is there twice, with different ids"),
        (jagged({"d": BAGS["a"]}), r"feature 'a' is missing, it has \['d'\]"),
        (
            KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.arange(4), lengths=torch.ones(3, dtype=torch.int32)),
            "lengths add up to 3, but there are 4 ids",
        ),
        (
            KeyedJaggedTensor(keys=["a", "b", "c"], values=torch.zeros(3), lengths=torch.ones(3, dtype=torch.int32)),
            "must be integers, got torch.float32",
        ),
        (
            KeyedJaggedTensor(
                keys=["a", "b", "c"],
                values=torch.arange(4),
                lengths=torch.ones(4, dtype=torch.int32),
                stride_per_key_per_rank=[[2], [1], [1]],
            ),
            "variable strides",
        ),
    ],
)
def test_other_batches_are_refused_in_one_line(batch: Any, text: str) -> None:
    with pytest.raises(InputError, match=text) as raised:
        BatchIds(("a", "b", "c")).of(batch, 4)
    assert "\n" not in str(raised.value)


def test_shorter_tensors_are_filled_up_with_examples_without_ids() -> None:
    """Users [B] beside candidates [B * K]."""
    found = BatchIds(("a", "b")).of({"users": jagged({"a": [[1], [2, 3]]}), "items": jagged({"b": [[4]] * 6})}, 0)
    assert found.lengths.tolist() == [[1, 2, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert found.values.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_a_key_can_be_there_twice_with_equal_ids() -> None:
    whole = jagged(BAGS)
    found = BatchIds(("a", "b", "c")).of((whole, whole.permute([2, 0])), 0)
    assert np.array_equal(found.values, BatchIds(("a", "b", "c")).of(whole, 0).values)


def test_tensors_that_no_table_reads_are_passed_over() -> None:
    other = KeyedJaggedTensor(
        keys=["x", "y"], values=torch.rand(4), lengths=torch.ones(4, dtype=torch.int32), stride_per_key=[3, 1]
    )
    assert BatchIds(("a", "b", "c")).of((other, jagged(BAGS)), 0).num_examples == NUM_EXAMPLES


def test_ids_are_of_any_integer_type_and_bags_by_offsets() -> None:
    narrow = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor([1, 2, 3], dtype=torch.int32), offsets=torch.tensor([0, 1, 1, 3, 3])
    )
    found = BatchIds(("a", "b")).of(narrow, 0)
    assert found.values.dtype == np.int64
    assert found.lengths.tolist() == [[1, 0], [2, 0]]


def test_unsigned_ids_are_the_signed_ones_with_the_same_bits() -> None:
    """In batches, in the model's lookups, in rows that are loaded and in those that are read."""
    states = []
    for dtype in (np.uint64, np.int64):
        data = batches(4)
        for batch in data:
            ids = batch["ids"]
            words = torch.from_numpy((ids.values().numpy().view(np.uint64) + np.uint64(2**63 - 30)).view(dtype))
            batch["ids"] = KeyedJaggedTensor(keys=ids.keys(), values=words, lengths=ids.lengths())
        some = torch.from_numpy(np.arange(2**63 - 30, 2**63 + 30, dtype=np.uint64).view(dtype))
        with pipeline(unbounded="*") as trained:
            trained.load_rows("t_f0", some[::7], torch.ones(9, DIM))
            losses = progress_all(trained, iter(data))
            rows = {name: trained.rows(f"t_{name}") for name in ("f0", "f1", "f2")}
            assert torch.equal(rows["f0"][some], rows["f0"][list(range(2**63 - 30, 2**63 + 30))])
            assert int(rows["f0"].ids().min()) < 0
            states.append({name: found[some] for name, found in rows.items()} | {"loss": torch.stack(losses)})
    assert_same(*states)
