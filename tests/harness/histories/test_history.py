"""Events are paired to operations, and files of events read back."""

from __future__ import annotations

import pytest

from tests.harness.histories.events import Kind, Phase, Recorder, from_lines, to_lines
from tests.harness.histories.history import NEVER, paired
from tests.harness.histories.stories import Story


def test_operations_of_every_kind() -> None:
    story = Story()
    story.take_over(1, {0: [7]})
    story.append(0, 2)
    story.begin_append(1, job=1, writer=1)
    story.read({0: [1]}, torn=[2])
    story.prove(1, 0, 1)
    story.begin_loss(0, 1)
    story.begin_take_over(2)
    history = paired(from_lines(to_lines(story.recorder.events)))
    (undo, kept), (first, second) = history.takeovers, history.appends
    assert (undo.job, undo.checkpoint, undo.acquired, undo.end) == (1, {0: (7,)}, 2, 3)
    assert (kept.checkpoint, kept.end) == (None, NEVER)
    assert (first.phase, first.rows, first.start, first.end) == (Phase.OK, {0, 2}, 4, 5)
    assert (second.phase, second.writer, second.end) == (Phase.UNKNOWN, 1, NEVER)
    assert [(read.lists, read.torn) for read in history.reads] == [({0: (1,)}, (2,))]
    assert [proof.writers for proof in history.proofs] == [{0, 1}]
    assert [(loss.rows, loss.end) for loss in history.losses] == [({0, 1}, NEVER)]


def test_an_operation_ends_once() -> None:
    story = Story()
    append = story.begin_append(0)
    story.end(append)
    story.end(append)
    with pytest.raises(ValueError, match="event 3 completes operation 1, which is not under way"):
        paired(story.recorder.events)


def test_a_history_has_a_setting() -> None:
    with pytest.raises(ValueError, match="expected one setting, got 0"):
        paired(Recorder().events)


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"order": 0}', '{"order": 0, "process": "a", "phase": "no"}'])
def test_a_file_of_something_else(text: str) -> None:
    recorder = Recorder()
    recorder.invoke("a", Kind.FAULT, name="cut")
    with pytest.raises(ValueError, match="line 2: expected an event of a history, got "):
        from_lines(to_lines(recorder.events) + text)
