"""The checker on histories with losses, written by hand: what a loss may take, and what it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.histories.anomalies import Anomaly
from tests.harness.histories.events import Phase
from tests.harness.histories.stories import Story


def lost_beside_a_loss(story: Story) -> None:
    """Another server has lost its rows."""
    story.append(0)
    story.lose(2, 3)
    story.read({0: []})


def lost_after_a_loss(story: Story) -> None:
    story.lose(0)
    story.append(0)
    story.read({0: []})


def fenced_on_a_server_that_lost_nothing(story: Story) -> None:
    story.take_over(1)
    story.take_over(2)
    story.lose(2, 3)
    story.append(0, 2, job=1)


def unnoticed_by_the_writer(story: Story) -> None:
    story.append(0)
    story.lose(0, 1)
    story.append(1)
    story.read({0: [], 1: [2]})


def unnoticed_by_a_rotation(story: Story) -> None:
    story.append(0)
    story.lose(0, 1)
    story.prove()
    story.read({0: []})


def unnoticed_by_a_reader(story: Story) -> None:
    story.append(0)
    story.read({0: [1]})
    story.lose(0, 1, restarts=True)
    story.read({0: []})


def gap(story: Story) -> None:
    story.append(0)
    story.append(1)
    story.lose(0, 1)
    story.read({0: [], 1: [2]})


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (lost_beside_a_loss, Anomaly.LOST_WRITE),
        (lost_after_a_loss, Anomaly.LOST_WRITE),
        (fenced_on_a_server_that_lost_nothing, Anomaly.FENCED_WRITE),
        (unnoticed_by_the_writer, Anomaly.UNNOTICED_LOSS),
        (unnoticed_by_a_rotation, Anomaly.UNNOTICED_LOSS),
        (unnoticed_by_a_reader, Anomaly.UNNOTICED_LOSS),
        (gap, Anomaly.GAP),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_anomaly_is_found(tell: Callable[[Story], None], anomaly: Anomaly) -> None:
    story = Story()
    tell(story)
    assert story.anomalies() == {anomaly}


def a_loss_of_everything(story: Story) -> None:
    story.append(0)
    story.read({0: [1]})
    story.lose(0, 1, 2, 3, restarts=True)
    story.append(0, phase=Phase.UNKNOWN)
    story.read({0: []}, process="reader anew")
    story.take_over(2)
    story.append(0, job=2)
    story.read({0: [3]}, process="reader anew")


def a_loss_of_the_last_groups(story: Story) -> None:
    story.append(0)
    story.append(1)
    story.append(0)
    story.lose(0, 1)
    story.read({0: [1], 1: [2]})


def a_loss_of_a_group_in_another_bucket(story: Story) -> None:
    """The writer's log of bucket 1 is whole."""
    story.append(0)
    story.append(2)
    story.lose(0, 1, 2, 3)
    story.append(2)
    story.read({0: [], 2: [2, 3]})


def a_loss_that_took_nothing(story: Story) -> None:
    story.append(0)
    story.lose(0, 1)
    story.append(0)
    story.prove()
    story.read({0: [1, 2]})


def an_isolated_master(story: Story) -> None:
    """It answers with what it had."""
    story.append(0)
    loss = story.begin_loss(0, 1, keeps_prefix=False)
    story.append(0)
    story.read({0: [1, 2]})
    story.read({0: [1]})
    story.end(loss)
    story.read({0: [1, 2]})


def an_acquisition_that_was_lost(story: Story) -> None:
    """The replica that takes over does not know of it, so the earlier job goes on, and the later one ends."""
    story.take_over(1)
    story.take_over(2)
    story.lose(0, 1)
    story.append(0, job=1)
    story.read({0: [1]})
    story.append(0, job=2, phase=Phase.UNKNOWN)
    story.take_over(3)
    story.append(0, job=1, phase=Phase.UNKNOWN)
    story.read({0: [1]})


def an_undo_that_was_lost(story: Story) -> None:
    story.append(0)
    story.take_over(2, {})
    story.lose(0, 1)
    story.read({0: [1]})
    story.take_over(3, {})
    story.read({0: []})


@pytest.mark.parametrize(
    "tell",
    [
        a_loss_of_everything,
        a_loss_of_the_last_groups,
        a_loss_of_a_group_in_another_bucket,
        a_loss_that_took_nothing,
        an_isolated_master,
        an_acquisition_that_was_lost,
        an_undo_that_was_lost,
    ],
    ids=lambda tell: tell.__name__,
)
def test_a_clean_history(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert story.anomalies() == set()
