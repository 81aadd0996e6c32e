"""The checker on histories written by hand: each anomaly is found, and what looks like one is not. Losses elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.histories.anomalies import Anomaly
from tests.harness.histories.checker import check
from tests.harness.histories.events import Phase
from tests.harness.histories.history import paired
from tests.harness.histories.stories import Story


def torn(story: Story) -> None:
    story.append(0)
    story.read({}, torn=[0])


def phantom(story: Story) -> None:
    story.append(0)
    story.read({0: [1, 77]})


def phantom_of_another_row(story: Story) -> None:
    story.append(0)
    story.read({0: [1], 1: [1]})


def phantom_from_the_future(story: Story) -> None:
    story.read({0: [1]})
    story.append(0)


def dirty(story: Story) -> None:
    story.append(0, phase=Phase.FAIL)
    story.read({0: [1]})


def duplicated(story: Story) -> None:
    story.append(0)
    story.read({0: [1, 1]})


def lost(story: Story) -> None:
    story.append(0)
    story.append(0)
    story.read({0: [1]})


def lost_at_a_takeover(story: Story) -> None:
    """A takeover without a checkpoint keeps all rows."""
    story.append(0)
    story.take_over(2)
    story.read({0: []})


def lost_from_a_checkpoint(story: Story) -> None:
    story.append(0)
    story.append(2)
    story.take_over(2, {0: [1]})
    story.read({0: [], 2: []})


def stale(story: Story) -> None:
    story.append(0)
    story.read({0: []})
    story.read({0: [1]})


def stale_after_another_read(story: Story) -> None:
    """The append is under way all the time, but one read has seen it."""
    story.begin_append(0)
    story.read({0: [1]})
    story.read({0: []}, process="other")


def out_of_order(story: Story) -> None:
    story.append(0)
    story.append(0)
    story.read({0: [1, 2]})
    story.read({0: [2, 1]})


def two_branches(story: Story) -> None:
    """Two writers append to what both read before: each takes the other's away."""
    one, two = story.begin_append(0), story.begin_append(0, writer=1)
    story.read({0: [1]})
    story.read({0: [2]})
    story.end(one, Phase.UNKNOWN)
    story.end(two, Phase.UNKNOWN)


def fenced_and_acknowledged(story: Story) -> None:
    story.take_over(1)
    story.take_over(2)
    story.append(0, job=1)


def fenced_and_read(story: Story) -> None:
    story.take_over(2)
    story.append(0, job=1, phase=Phase.UNKNOWN)
    story.read({0: [1]})


def fenced_and_late(story: Story) -> None:
    """It was on its way when the namespace was acquired, and arrives afterwards."""
    story.begin_append(0, job=1)
    story.take_over(2)
    story.read({0: []})
    story.read({0: [1]})


def partial(story: Story) -> None:
    story.begin_append(0, 1)
    story.read({0: [1], 1: []})


def partial_of_a_later_row(story: Story) -> None:
    story.append(1)
    story.begin_append(0, 1, 2)
    story.read({0: [], 1: [1, 2], 2: []})


def not_undone(story: Story) -> None:
    story.append(0)
    story.append(0)
    story.take_over(2, {0: [1]})
    story.read({0: [1, 2]})


def not_undone_in_a_row_without_checkpoint(story: Story) -> None:
    story.append(0, phase=Phase.UNKNOWN)
    story.take_over(2, {})
    story.read({0: [1]})


FOUND: tuple[tuple[Callable[[Story], None], set[Anomaly]], ...] = (
    (torn, {Anomaly.TORN_ROW}),
    (phantom, {Anomaly.PHANTOM_READ}),
    (phantom_of_another_row, {Anomaly.PHANTOM_READ}),
    (phantom_from_the_future, {Anomaly.PHANTOM_READ}),
    (dirty, {Anomaly.DIRTY_READ}),
    (duplicated, {Anomaly.DUPLICATED_APPEND}),
    (lost, {Anomaly.LOST_WRITE}),
    (lost_at_a_takeover, {Anomaly.LOST_WRITE}),
    (lost_from_a_checkpoint, {Anomaly.LOST_WRITE}),
    (stale, {Anomaly.STALE_READ}),
    (stale_after_another_read, {Anomaly.STALE_READ}),
    (out_of_order, {Anomaly.INCOMPATIBLE_ORDER}),
    (two_branches, {Anomaly.INCOMPATIBLE_ORDER}),
    (fenced_and_acknowledged, {Anomaly.FENCED_WRITE}),
    (fenced_and_read, {Anomaly.FENCED_WRITE}),
    (fenced_and_late, {Anomaly.FENCED_WRITE}),
    (partial, {Anomaly.PARTIAL_GROUP}),
    (partial_of_a_later_row, {Anomaly.PARTIAL_GROUP}),
    (not_undone, {Anomaly.NOT_UNDONE}),
    (not_undone_in_a_row_without_checkpoint, {Anomaly.NOT_UNDONE}),
)


@pytest.mark.parametrize(("tell", "anomalies"), FOUND, ids=lambda value: getattr(value, "__name__", ""))
def test_an_anomaly_is_found(tell: Callable[[Story], None], anomalies: set[Anomaly]) -> None:
    story = Story()
    tell(story)
    assert story.anomalies() == anomalies


def test_every_anomaly_has_a_history() -> None:
    """Those of losses are in `test_losses.py`."""
    found = set().union(*(anomalies for _, anomalies in FOUND))
    assert found == set(Anomaly) - {Anomaly.UNNOTICED_LOSS, Anomaly.GAP}


def nothing(story: Story) -> None:
    story.read({0: [], 3: []})


def appends_of_two_writers(story: Story) -> None:
    one, two = story.begin_append(0, 1), story.begin_append(2, 3, writer=1)
    story.read({0: [1], 1: [1], 2: []})
    story.end(two)
    story.end(one)
    story.append(1, 2)
    story.read({0: [1], 1: [1, 3], 2: [2, 3], 3: [2]})


def an_unknown_append_that_came(story: Story) -> None:
    story.append(0, phase=Phase.UNKNOWN)
    story.read({0: []})
    story.read({0: [1]})
    story.read({0: [1]})


def an_append_under_way_and_two_reads_at_once(story: Story) -> None:
    """The reads overlap, so the one that ends first may have seen more."""
    append = story.begin_append(0)
    slow = story.begin_read()
    story.read({0: [1]}, process="other")
    story.end_read(slow, {0: []})
    story.end(append)


def a_refused_append(story: Story) -> None:
    story.append(0)
    story.append(0, phase=Phase.FAIL)
    story.read({0: [1]})


def a_write_in_two_buckets(story: Story) -> None:
    """Only the rows of a bucket are one group."""
    story.begin_append(0, 1, 2)
    story.read({0: [1], 1: [1], 2: []})


def a_write_that_two_reads_see_in_part(story: Story) -> None:
    """A read of one row and then a read of the other row: no read is partial."""
    story.begin_append(0, 1)
    story.read({0: []})
    story.read({1: [1]})


def a_takeover_that_keeps_rows(story: Story) -> None:
    story.take_over(1)
    story.append(0)
    story.take_over(2)
    story.append(0, job=1, phase=Phase.UNKNOWN)
    story.append(0, job=1, phase=Phase.FAIL)
    story.append(0, job=2)
    story.read({0: [1, 4]})


def an_old_write_that_came_before_the_acquisition(story: Story) -> None:
    late = story.begin_append(0, job=1)
    story.take_over(2)
    story.read({0: [1]})
    story.end(late)


def an_undo(story: Story) -> None:
    story.append(0)
    story.append(0, 1)
    undo = story.begin_take_over(2, {0: [1]})
    story.read({0: [1, 2], 1: []})
    story.end(undo)
    story.read({0: [1], 1: []})
    story.append(0, job=2)
    story.read({0: [1, 3]})


def an_undo_that_failed_and_one_that_did_not(story: Story) -> None:
    story.append(0)
    story.append(1)
    failed = story.begin_take_over(2, {0: [1]})
    story.end(failed, Phase.UNKNOWN)
    story.read({0: [], 1: [2]})
    story.take_over(3, {0: [1]})
    story.read({0: [1], 1: []})


@pytest.mark.parametrize(
    "tell",
    [
        nothing,
        appends_of_two_writers,
        an_unknown_append_that_came,
        an_append_under_way_and_two_reads_at_once,
        a_refused_append,
        a_write_in_two_buckets,
        a_write_that_two_reads_see_in_part,
        a_takeover_that_keeps_rows,
        an_old_write_that_came_before_the_acquisition,
        an_undo,
        an_undo_that_failed_and_one_that_did_not,
    ],
    ids=lambda tell: tell.__name__,
)
def test_a_clean_history(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert story.anomalies() == set()


def test_a_finding_names_what_shows_it() -> None:
    story = Story()
    number = story.append(0, 1)
    story.read({0: [number], 1: []})
    (lost, partial) = check(paired(story.recorder.events))
    assert str(lost) == "lost-write, row 1, append 1; operations 1, 3"
    assert (partial.anomaly, partial.row, partial.operations) == (Anomaly.PARTIAL_GROUP, 1, (1, 3))
