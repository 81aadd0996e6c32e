"""Parts of a loop: their handlers and hooks are combined into one handler per action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.loop_builder import Composition, LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.part import Hook, LoopPart, LoopRun, handlers_of


class RecordingPart(LoopPart):
    """A part that records its calls, with handlers of the given operations and hooks at the given points."""

    def __init__(
        self, log: list[str], name: str, ops: Iterable[str] = (), hooks: Mapping[Point, Literal["before", "after"]] = {}
    ) -> None:
        self.name = name
        self._log = log
        self._ops = tuple(ops)
        self._hooks = dict(hooks)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {op: lambda index, op=op: self._log.append(f"{self.name}.{op}{index}") for op in self._ops}  # type: ignore[misc]

    def hooks(self) -> Iterable[Hook]:
        for point, when in self._hooks.items():
            yield Hook(at=point, when=when, call=self._hooked)

    def counters(self) -> Mapping[str, int]:
        return {self.name: 1}

    def _hooked(self, key: OpKey, index: int) -> None:
        self._log.append(f"{self.name} at {key[0]}{key[1]}{index}")


def composition(**points: tuple[OpKey, ...]) -> Composition:
    loop = LoopBuilder(read_ahead=1)
    loop.lane("data", "X_READ")
    loop.lane("compute", "F", "OPT")
    loop.provide(Point.LOOKUP, "F")
    return Composition(loop=loop.build().loop, points={Point[name]: keys for name, keys in points.items()})


def test_hooks_come_before_and_after_in_the_order_of_the_parts() -> None:
    log: list[str] = []
    parts = [
        RecordingPart(log, "first", hooks={Point.STEP: "before", Point.LOOKUP: "after"}),
        RecordingPart(log, "dense", ["F", "0OPT", "1OPT"], {Point.STEP: "after"}),
        RecordingPart(log, "last", hooks={Point.STEP: "before"}),
    ]
    handlers = handlers_of(parts, composition(STEP=((0, "OPT"), (1, "OPT")), LOOKUP=((0, "F"),)))
    assert handlers.keys() == {"F", "0OPT", "1OPT"}
    handlers["1OPT"](4)
    assert log == ["first at 1OPT4", "last at 1OPT4", "dense.1OPT4", "dense at 1OPT4"]
    log.clear()
    handlers["F"](2)
    assert log == ["dense.F2", "first at 0F2"]


def test_two_parts_with_one_operation_are_refused() -> None:
    with pytest.raises(ScheduleError, match="RecordingPart and RecordingPart both handle F"):
        handlers_of([RecordingPart([], "a", ["F"]), RecordingPart([], "b", ["F"])], composition())


def test_a_hook_at_a_missing_point_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no part of the loop provides the point 'step'"):
        handlers_of([RecordingPart([], "a", ["F"], {Point.STEP: "after"})], composition())


def test_a_run_keeps_the_counters_of_all_parts() -> None:
    run = LoopRun(batches=iter(()), parts=[RecordingPart([], "a"), RecordingPart([], "b")])
    assert run.counters() == {"a": 1, "b": 1}
    assert run.first_error() is None
    run.abort(ValueError("nothing runs yet"))
