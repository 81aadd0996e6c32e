"""Both ends of the conversation about plans, against each other and against ends that do not keep to it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bagpipe.client.codec import CodecError
from bagpipe.errors import InputError
from bagpipe.lookahead.frames import FrameKind, decode_error, encode_error, encode_spec
from bagpipe.lookahead.ids import encode_ids
from bagpipe.lookahead.interface import GlobalPlan
from bagpipe.lookahead.link import Frame, LinkClosed
from bagpipe.lookahead.protocol import Intake, requested_plans, serve_runs
from bagpipe.types.batch import Batch
from tests.lookahead.streams import batches_of, expected_parts, plain_part, spec_of

START, BATCH, END = FrameKind.START, FrameKind.BATCH, FrameKind.END
PLAN, MORE, ERROR = FrameKind.PLAN, FrameKind.MORE, FrameKind.ERROR


class Scripted:
    """A link whose other end says the same whatever it gets, and is then gone."""

    def __init__(self, frames: Sequence[Frame] = ()) -> None:
        self.sent: list[Frame] = []
        self._frames = deque(frames)

    def send(self, kind: int, run: int, parts: Sequence[Any] = ()) -> None:
        self.sent.append(frame(kind, *parts, run=run))

    def receive(self) -> Frame:
        if not self._frames:
            raise LinkClosed
        return self._frames.popleft()


def frame(kind: int, *parts: Any, run: int = 1) -> Frame:
    return Frame(kind=kind, run=run, data=bytearray().join(parts))


def start(run: int = 1, **spec: int) -> Frame:
    return frame(START, encode_spec(spec_of(**spec)), run=run)


def ids(batch: Batch, run: int = 1) -> Frame:
    return frame(BATCH, *encode_ids(batch), run=run)


def said(*frames: Frame, intake: type[Intake] = Intake) -> list[tuple[int, int]]:
    """Kinds and runs of what the planner's end says until the link ends."""
    link = Scripted(frames)
    with pytest.raises(LinkClosed):
        serve_runs(link, intake)
    return [(frame.kind, frame.run) for frame in link.sent]


def plans(*frames: Frame, batches: Sequence[Batch]) -> Iterator[GlobalPlan]:
    """What the end that brings batches makes of the frames of a planner."""
    return requested_plans(Scripted(frames), 1, spec_of(), iter(batches), lambda batch: None, max_held=7)


def answers(batches: Sequence[Batch]) -> list[Frame]:
    """What an honest planner says to some batches."""
    link = Scripted([start(), *map(ids, batches), frame(END)])
    with pytest.raises(LinkClosed):
        serve_runs(link)
    return link.sent


def test_one_end_understands_the_other() -> None:
    batches = batches_of(9)
    found = plans(*answers(batches), batches=batches)
    parts = [plain_part(plan.part(0, batch)) for plan, batch in zip(found, batches, strict=True)]
    assert parts == expected_parts(batches, spec_of())


def test_a_plan_for_each_rank() -> None:
    kinds = said(start(world_size=2, num_slots=0), frame(END))
    assert kinds == [(END, 1)]
    batch = batches_of(1)[0]
    with_ranks = Batch(
        index=0,
        dense=batch.dense,
        values=batch.values,
        lengths=batch.lengths,
        labels=batch.labels,
        rank_examples=(3, 1),
    )
    assert said(start(world_size=2), ids(with_ranks), frame(END)) == [(PLAN, 1), (PLAN, 1), (END, 1)]


def test_a_start_ends_the_run_before_it() -> None:
    first, second = batches_of(2)
    frames = [start(), ids(first), ids(second), start(2), ids(first, 2), frame(END, run=2)]
    assert said(*frames) == [(PLAN, 2), (END, 2)]


def test_batches_after_an_error_are_dropped() -> None:
    class Refusing(Intake):
        def __init__(self, start: bytearray) -> None:
            raise InputError("no")

    batch = batches_of(1)[0]
    assert said(start(), ids(batch), frame(END), start(2), intake=Refusing) == [(ERROR, 1), (ERROR, 2)]


@pytest.mark.parametrize(
    "bad", [frame(BATCH, b"short"), frame(PLAN), frame(99), ids(batches_of(1)[0], run=2), frame(END, run=2)]
)
def test_what_is_no_frame_of_the_run_ends_the_planner_at_once(bad: Frame) -> None:
    link = Scripted([start(), *map(ids, batches_of(2)), bad])
    with pytest.raises(CodecError, match=r"^(malformed ids: 5 bytes|frame of kind)"):
        serve_runs(link)
    assert link.sent == []  # a run at its end would plan what it has


@pytest.mark.parametrize(
    "bad",
    [
        [END],
        [PLAN, END],
        [PLAN] * 10,
        [BATCH],
        [99],
        [MORE, MORE],
    ],
)
def test_a_planner_that_says_something_else(bad: list[int]) -> None:
    with pytest.raises(CodecError, match=r"^frame of kind \d+ after \d+ plans of \d+ batches$"):
        list(plans(*map(frame, bad), batches=batches_of(9)))


def test_an_early_end_is_no_end() -> None:
    """The batches after it must not be missing from training."""
    batches = batches_of(9)
    honest = answers(batches)
    for end in range(9):
        found = []
        with pytest.raises(CodecError):
            found.extend(plans(*honest[:end], frame(END), batches=batches))
        assert len(found) == end


def test_a_planner_that_is_gone() -> None:
    with pytest.raises(LinkClosed):
        list(plans(*answers(batches_of(9))[:-1], batches=batches_of(9)))


def test_the_error_of_the_planner_is_that_of_the_run() -> None:
    error = InputError("bad id")
    run = plans(frame(PLAN), frame(ERROR, encode_error(error)), batches=batches_of(3))
    assert len(list(itertools.islice(run, 1))) == 1
    with pytest.raises(StopIteration) as ended:
        next(run)
    assert str(ended.value.value) == str(decode_error(bytearray(encode_error(error)))) == "bad id"
