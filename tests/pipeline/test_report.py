from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.pipeline.report import StepTimes


def test_a_report_without_batches() -> None:
    times = StepTimes()
    times.mark(5)
    report = times.report()
    assert (report.count, report.total_s, report.quantile_s(0.5)) == (0, 0.0, 0.0)


@given(st.integers(0, 300), st.integers(2, 16))
def test_the_sample_is_bounded_even_and_in_order(count: int, capacity: int) -> None:
    times, now_ns = StepTimes(capacity), 0
    times.mark(now_ns)
    for step_ns in range(count):
        now_ns += step_ns
        times.mark(now_ns)
    report = times.report()
    assert report.count == count
    assert report.total_s == pytest.approx(now_ns / 1e9)
    assert len(report.sample_ns) <= capacity
    assert list(report.sample_ns) == list(range(0, count, report.stride))[: len(report.sample_ns)]
    assert len(report.sample_ns) * report.stride >= count


def test_quantiles() -> None:
    times, now_ns = StepTimes(), 0
    for step_ns in range(101):
        now_ns += step_ns * 1_000_000_000
        times.mark(now_ns)
    report = times.report()
    assert [report.quantile_s(q) for q in (0, 0.5, 1)] == [1.0, 51.0, 100.0]
    assert report.max_s == 100.0


def test_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        StepTimes(1)
