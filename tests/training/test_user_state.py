"""States of a user in a checkpoint. Whole jobs: `tests.system.test_checkpoint_by_hand`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError, JobError
from bagpipe.training.part import LoopRun
from bagpipe.training.user_state import MAX_STATE_BYTES, UserState, saved_state

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def through_a_manifest(state: Any) -> dict[str, Any] | None:
    return saved_state(json.loads(json.dumps(UserState(lambda step: state).counters())))


@given(st.dictionaries(st.text(), JSON | st.binary()))
def test_a_state_comes_back(state: dict[str, Any]) -> None:
    assert through_a_manifest(state) == state


def test_the_state_is_that_of_the_checkpoints_step() -> None:
    part = UserState(lambda step: {"step": step})
    part.start(LoopRun(batches=iter(()), parts=(part,), first_batch=7))
    assert saved_state(part.counters()) == {"step": 7}
    part.finish_batch(7)
    part.finish_batch(8)
    assert saved_state(part.counters()) == {"step": 9}


def test_the_caller_can_change_the_state_afterwards() -> None:
    state = {"seen": [1, 2]}
    progress = UserState(lambda step: state).counters()
    state["seen"].append(3)
    assert saved_state(progress) == {"seen": [1, 2]}


def test_a_checkpoint_without_a_state_has_none() -> None:
    assert saved_state({"samples": 3}) is None
    assert through_a_manifest({}) == {}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], r"step 0: expected a mapping with strings as keys, got \[1\]"),
        ({1: 2}, "expected a mapping with strings as keys, got {1: 2}"),
        ({"epoch": 1, "loader": object()}, "expected bytes or JSON for 'loader', got <object .* not JSON serializable"),
        ({"blob": bytes(MAX_STATE_BYTES)}, f"expected at most {MAX_STATE_BYTES} bytes, as JSON and base64, got 559"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused(state: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        UserState(lambda step: state).counters()


@pytest.mark.parametrize(
    "record", [[], {"values": {}}, {"values": {}, "bytes": {"a": "!"}}, {"values": 1, "bytes": {}}]
)
def test_a_damaged_state_is_named(record: Any) -> None:
    with pytest.raises(InputError, match="the user's state in the checkpoint cannot be read"):
        saved_state({"user_state": record})
