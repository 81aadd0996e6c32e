"""Serial histories are clean, and a seeded change of what a read returned is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.histories.anomalies import Anomaly
from tests.harness.histories.checker import check
from tests.harness.histories.events import Event, Kind, Phase, from_lines, to_lines
from tests.harness.histories.history import paired
from tests.harness.histories.stories import Story

ROWS = (0, 1, 2, 3)
BUCKETS = ((0, 1), (2, 3))

Lists = dict[int, list[int]]


class SerialStore:
    """A store that does one thing after the other: it draws what, and tells the story."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.story = Story()
        self.lists: Lists = {row: [] for row in ROWS}
        self.checkpoint: Lists = {row: [] for row in ROWS}
        self.undoes = self.draw.random() < 0.5
        self.job = 0
        self.take_over()
        steps: list[Callable[[], None]] = [self.append, self.append, self.read, self.read, self.save, self.late]
        for _ in range(self.draw.randint(1, 40)):
            self.draw.choice([*steps, self.take_over, self.lose] if self.draw.random() < 0.3 else steps)()
        self.append()
        for _ in range(3):
            self.read(everything=True)

    def append(self) -> None:
        rows = self.draw.sample(ROWS, self.draw.randint(1, 4))
        phase = self.draw.choice([Phase.OK, Phase.OK, Phase.OK, Phase.UNKNOWN, Phase.FAIL])
        number = self.story.append(*rows, job=self.job, writer=self.draw.randint(0, 1), phase=phase)
        has_come = phase is Phase.OK or (phase is Phase.UNKNOWN and self.draw.random() < 0.5)
        for row in rows if has_come else ():
            self.lists[row].append(number)
        if phase is Phase.UNKNOWN:
            self.take_over()  # the job has ended

    def late(self) -> None:
        """A write of an earlier job, which is refused."""
        if self.job > 1:
            phase = self.draw.choice([Phase.UNKNOWN, Phase.FAIL])
            self.story.append(self.draw.choice(ROWS), job=self.job - 1, phase=phase)

    def read(self, *, everything: bool = False) -> None:
        rows = ROWS if everything else self.draw.sample(ROWS, self.draw.randint(1, 4))
        self.story.read({row: self.lists[row] for row in rows}, process=f"session {len(self.story.recorder.events)}")

    def save(self) -> None:
        self.checkpoint = {row: list(numbers) for row, numbers in self.lists.items()}
        self.story.prove(self.job, 0, 1)

    def take_over(self) -> None:
        self.job += 1
        undo = self.story.begin_take_over(self.job, self.checkpoint if self.undoes else None)
        if self.undoes:
            self.lists = {row: list(numbers) for row, numbers in self.checkpoint.items()}
        self.story.end(undo)

    def lose(self) -> None:
        """A bucket's server loses the appends from some moment on, and the job ends."""
        rows = self.draw.choice(BUCKETS)
        kept = self.draw.randint(0, self.story.recorder.num_appends)
        self.story.lose(*rows, restarts=True)
        for row in rows:
            self.lists[row] = [number for number in self.lists[row] if number <= kept]
        self.take_over()


@given(seed=st.integers(0, 2**32 - 1))
def test_a_serial_history_is_clean(seed: int) -> None:
    events = SerialStore(seed).story.recorder.events
    assert check(paired(events)) == ()
    assert check(paired(from_lines(to_lines(events)))) == ()


def drop(draw: random.Random, lists: Lists, read: int) -> Lists:
    """The last append is missing from every read of a row."""
    last = max(number for numbers in lists.values() for number in numbers)
    row = next(row for row in ROWS if last in lists[row])
    return {**lists, row: [number for number in lists[row] if number != last]}


def swap(draw: random.Random, lists: Lists, read: int) -> Lists:
    """One read has two appends in the other order."""
    row = next(row for row in ROWS if len(lists[row]) > 1)
    first, second, *others = lists[row]
    return {**lists, row: [second, first, *others]} if read == 1 else lists


def repeat(draw: random.Random, lists: Lists, read: int) -> Lists:
    """An append was executed twice."""
    row = draw.choice([row for row in ROWS if lists[row]])
    return {**lists, row: [*lists[row], lists[row][-1]]}


def invent(draw: random.Random, lists: Lists, read: int) -> Lists:
    """A number that nobody appended."""
    row = draw.choice(ROWS)
    return {**lists, row: [*lists[row], 9_999]}


@pytest.mark.parametrize(
    ("change", "anomaly"),
    [
        (drop, Anomaly.LOST_WRITE),
        (swap, Anomaly.INCOMPATIBLE_ORDER),
        (repeat, Anomaly.DUPLICATED_APPEND),
        (invent, Anomaly.PHANTOM_READ),
    ],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_change_is_found(change: Callable[[random.Random, Lists, int], Lists], anomaly: Anomaly, seed: int) -> None:
    serial = SerialStore(seed)
    for _ in range(2):  # something to drop and to swap, acknowledged
        number = serial.story.append(*ROWS, job=serial.job)
        for row in ROWS:
            serial.lists[row].append(number)
    for _ in range(3):
        serial.read(everything=True)
    events = list(serial.story.recorder.events)
    reads = [at for at, event in enumerate(events) if event.kind is Kind.READ and event.phase is Phase.OK][-3:]
    for read, at in enumerate(reads):
        events[at] = changed(events[at], change(random.Random(seed), dict(serial.lists), read))
    assert anomaly in {finding.anomaly for finding in check(paired(events))}


def changed(event: Event, lists: Lists) -> Event:
    return replace(event, facts={**event.facts, "lists": lists})
