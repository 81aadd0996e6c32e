from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.fencing.fence import (
    MAX_CHECKPOINT_ID_BYTES,
    Fence,
    check_checkpoint_id,
    check_token,
    checkpoint_id_key,
    distinct_fields,
    fenced_log_key,
    invalidated,
    log_key,
    log_name,
    logs_key,
    open_key,
    owner_key,
    parse_log_name,
)
from bagpipe.store.keys import FIELD_DTYPE, bucket_key, key_slot

NONCE = "0123456789abcdef0123456789abcdef"
FENCE = Fence(token=f"7-{NONCE}", writer=3, epoch=12)


def test_the_names_in_the_store() -> None:
    key = bucket_key("job", 5)
    assert log_name(FENCE) == f"7-{NONCE}:12:3".encode()
    assert [owner_key(key), checkpoint_id_key(key), logs_key(key), open_key(key)] == [
        b"job:{5}:owner", b"job:{5}:checkpoint_id", b"job:{5}:logs", b"job:{5}:open",
    ]  # fmt: skip
    assert log_key(key, FENCE) == f"job:{{5}}:log:7-{NONCE}:12:3".encode()
    assert fenced_log_key(key, FENCE) == f"job:{{5}}:fenced:7-{NONCE}:12:3".encode()
    keys = (
        owner_key(key),
        checkpoint_id_key(key),
        logs_key(key),
        open_key(key),
        log_key(key, FENCE),
        fenced_log_key(key, FENCE),
    )
    assert len({key_slot(name) for name in (key, *keys)}) == 1, "one hash slot"


@given(st.integers(0, 10**17), st.integers(0, 2**31), st.integers(0, 10_000))
def test_the_name_of_a_log_reads_back(generation: int, epoch: int, writer: int) -> None:
    fence = Fence(token=f"{generation}-{NONCE}", writer=writer, epoch=epoch)
    assert parse_log_name(log_name(fence)) == fence


@pytest.mark.parametrize("name", [b"", b"x:1:2", f"7-{NONCE}:1".encode(), f"7-{NONCE}:1:x".encode()])
def test_invalid_log_names(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected a token|not enough values|invalid literal"):
        parse_log_name(name)


@pytest.mark.parametrize(
    "token", ["", "7", NONCE, f"7-{NONCE}0", f"7-{NONCE[:-1]}", f"-1-{NONCE}", f"7-{NONCE.upper()}"]
)
def test_no_token(token: str) -> None:
    with pytest.raises(ValueError, match="expected a token"):
        check_token(token)


def test_how_long_a_checkpoint_id_may_be() -> None:
    check_checkpoint_id("x" * MAX_CHECKPOINT_ID_BYTES)
    with pytest.raises(ValueError, match="at most 200 bytes, got 202"):
        check_checkpoint_id("é" * 101)


def test_a_checkpoint_id_is_invalidated_once() -> None:
    assert invalidated("a:1:2") == invalidated(invalidated("a:1:2")) == "a:1:2:invalidated"
    assert invalidated("") == ""


ROWS = st.tuples(st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1))
FEW_ROWS = st.tuples(st.integers(0, 2), st.integers(-2, 2))


@given(st.lists(ROWS | FEW_ROWS))
def test_distinct_fields_are_a_sorted_set(rows: list[tuple[int, int]]) -> None:
    for dtype in (FIELD_DTYPE, FIELD_DTYPE.newbyteorder("=")):
        found = distinct_fields(np.array(rows, dtype))
        assert found.dtype == FIELD_DTYPE
        assert found.tolist() == sorted(set(rows))
