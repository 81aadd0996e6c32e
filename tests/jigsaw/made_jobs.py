"""Jobs for tests: one by hand, and strategies with whole seconds, so that times are exact."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from bagpipe.jigsaw.job import TrainingJob

__all__ = ["job", "job_lists", "together"]


def job(name: str = "a", **more: Any) -> TrainingJob:
    """Two workers; forward 1 s, backward 2 s, exchange 1 s."""
    values = {"iterations": 4, "workers": 2, "forward_s": 1.0, "backward_s": (2.0,), "sync_s": 1.0}
    return TrainingJob(name=name, **(values | more))


@st.composite
def _job(draw: st.DrawFn, number: int, workers: int, *, timed: bool) -> TrainingJob:
    arrival_s = float(draw(st.integers(0, 9))) if timed else 0.0
    deadline = draw(st.none() | st.integers(1, 60)) if timed else None
    return TrainingJob(
        name=f"job {number}",
        iterations=draw(st.integers(1, 5)),
        workers=workers,
        forward_s=float(draw(st.integers(1, 3))),
        backward_s=tuple(4.0 * draw(st.integers(0, 2)) for _ in range(draw(st.sampled_from([1, 2])))),
        sync_s=float(draw(st.sampled_from([0, 1, 7]))),
        shares=(*(draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(workers - 1)), 1.0),
        arrival_s=arrival_s,
        deadline_s=None if deadline is None else arrival_s + deadline,
        weight=float(draw(st.integers(1, 3))),
    )


@st.composite
def job_lists(draw: st.DrawFn) -> tuple[list[TrainingJob], int]:
    """Any jobs and ranks: widths, arrivals and deadlines differ."""
    ranks = draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    return [draw(_job(number, draw(st.integers(1, ranks)), timed=True)) for number in range(count)], ranks


@st.composite
def together(draw: st.DrawFn, narrow: bool = False) -> tuple[list[TrainingJob], int]:
    """Jobs without deadlines that arrive at once; each wants all ranks, or some of them if `narrow`."""
    ranks = draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    widths = [draw(st.integers(1, ranks)) if narrow else ranks for _ in range(count)]
    return [draw(_job(number, width, timed=False)) for number, width in enumerate(widths)], ranks
