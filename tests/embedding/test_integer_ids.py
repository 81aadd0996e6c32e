"""Ids of any integer type are int64 by one rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.embedding.integer_ids import as_int64, given_ids
from bagpipe.errors import InputError


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_narrow_ids_keep_their_values(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    assert as_int64(torch.tensor([0, 7, largest], dtype=dtype), "ids").tolist() == [0, 7, largest]


def test_unsigned_ids_of_64_bits_keep_their_bits() -> None:
    ids = torch.tensor([0, 2**63 - 1, 2**63, 2**64 - 1], dtype=torch.uint64)
    assert as_int64(ids, "ids").tolist() == [0, 2**63 - 1, -(2**63), -1]
    signed = torch.tensor([-1, 5])
    assert as_int64(signed, "ids") is signed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_anything_else_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"ids of keys .* must be integers, got {dtype}"):
        as_int64(torch.ones(3).to(dtype), "ids of keys ['x']")


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2**63 - 1, 2**63, 2**64 - 1],
        np.array([1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64),
        torch.tensor([1, 2**63 - 1, 2**63, 2**64 - 1], dtype=torch.uint64),
        (1, 2**63 - 1, -(2**63), 2**64 - 1),
        range(1, 1),
    ],
)
def test_a_caller_may_name_ids_in_any_form(ids: Any) -> None:
    expected = [1, 2**63 - 1, -(2**63), -1][: len(ids)]
    assert given_ids(ids, "ids").tolist() == expected
    assert given_ids(ids, "ids").dtype is torch.int64


@pytest.mark.parametrize("ids", [[2**64], [-(2**63) - 1], ["a"], [[1]], [0.5], [True], [2**63, 0.5]])
def test_what_is_no_id_is_named(ids: Any) -> None:
    with pytest.raises(InputError, match=r"ids of table 'x' must be .*integers.*, got"):
        given_ids(ids, "ids of table 'x'")
