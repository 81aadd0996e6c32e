"""States come back from their bytes as they were, and no code with them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.train_pipeline.plain_state import from_bytes, to_bytes

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(_KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(STATES)
def test_plain_values_come_back_as_they_were(state: Any) -> None:
    back = from_bytes(to_bytes(state))
    assert back == state
    assert type(back) is type(state)


def test_tensors_and_arrays_come_back_bit_for_bit() -> None:
    base = torch.arange(6, dtype=torch.float64)
    state = {"a": [base, base[::2]], 3: torch.get_rng_state(), "n": np.arange(3, dtype=np.int16), "s": np.float32(0.5)}
    back = from_bytes(to_bytes(state))
    assert torch.equal(back["a"][0], base)
    assert torch.equal(back["a"][1], base[::2])
    assert torch.equal(back[3], state[3])
    assert back["n"].dtype == np.int16
    assert (back["n"].tolist(), back["s"]) == ([0, 1, 2], 0.5)


def test_kinds_of_dictionaries_become_dictionaries() -> None:
    assert from_bytes(to_bytes(OrderedDict(a=Counter({5: 2})))) == {"a": {5: 2}}


def test_other_types_and_other_bytes_are_refused() -> None:
    with pytest.raises(InputError, match="tensors, arrays and plain Python values, got object"):
        to_bytes({"a": [object()]})
    for data in (b"", b"\x00" * 20, to_bytes({})[:-1] + b"}}"):
        with pytest.raises(ValueError, match=r".+"):
            from_bytes(data)
