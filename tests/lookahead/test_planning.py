"""Order and errors of a stream of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import CapacityError, InputError
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.planning import in_order
from bagpipe.types.batch import Batch
from tests.lookahead.streams import batch_of, batches_of, spec_of


def yielded(batches: Iterator[Batch], error: type[Exception], words: str, *, lookahead: int = 3) -> list[int]:
    """Indexes of the batches that come before an error."""
    found: list[int] = []
    with pytest.raises(error, match=words):
        found.extend(part.batch.index for part in InlinePlanner(spec_of(lookahead=lookahead)).run(batches))
    return found


def failing(count: int, error: Exception) -> Iterator[Batch]:
    yield from batches_of(count)
    raise error


@pytest.mark.parametrize("lookahead", [1, 3, 9])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_error_of_the_batches_comes_after_those_before(count: int, lookahead: int) -> None:
    assert yielded(failing(count, KeyError("disk")), KeyError, "disk", lookahead=lookahead) == list(range(count))


@pytest.mark.parametrize("lookahead", [1, 3, 9])
def test_a_bad_id_comes_after_the_batches_before(lookahead: int) -> None:
    batches = iter([*batches_of(4), batch_of(4, 100), *batches_of(6)[5:]])
    assert yielded(batches, InputError, "100", lookahead=lookahead) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("indexes", "first", "good", "words"),
    [
        ([0, 1, 3], 0, [0, 1], "expected batch 2, got batch 3"),
        ([0, 1, 1], 0, [0, 1], "expected batch 2, got batch 1"),
        ([2, 3], 1, [], "expected batch 1, got batch 2"),
    ],
)
def test_batches_out_of_order(indexes: list[int], first: int, good: list[int], words: str) -> None:
    found: list[int] = []
    with pytest.raises(InputError, match=words):
        found.extend(batch.index for batch in in_order([batch_of(index, 1) for index in indexes], first))
    assert found == good


def test_earlier_batches_are_dropped() -> None:
    planner = InlinePlanner(spec_of())
    assert [part.batch.index for part in planner.run(batches_of(6), first_batch=4)] == [4, 5]
    assert [part.batch.index for part in planner.run(batches_of(6)[4:], first_batch=4)] == [4, 5]
    assert not list(planner.run(batches_of(3), first_batch=4))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_the_error_of_a_large_batch_names_the_cache_that_its_window_needs(
    needs: list[int], num_slots: int, lookahead: int
) -> None:
    spec = spec_of(num_slots=num_slots, lookahead=lookahead)
    batches = [batch_of(index, *range(need)) for index, need in enumerate(needs)]
    too_large = next((index for index, need in enumerate(needs) if need > num_slots), None)
    planner = InlinePlanner(spec)
    if too_large is None:
        assert len(list(planner.run(batches))) == len(batches)
        return
    window = needs[too_large : too_large + lookahead]
    with pytest.raises(CapacityError) as caught:
        list(planner.run(batches))
    assert str(caught.value) == (
        f"batch {too_large} needs {needs[too_large]} unique rows but cache_rows is {num_slots}: raise cache_rows to at "
        f"least {max(window)}, the largest need up to batch {too_large + len(window) - 1}, or bring smaller batches"
    )


def test_an_error_behind_a_large_batch_does_not_hide_it() -> None:
    def batches() -> Iterator[Batch]:
        yield batch_of(0, *range(21))
        raise KeyError("disk")

    assert yielded(batches(), CapacityError, "at least 21, the largest need up to batch 0, or") == []
