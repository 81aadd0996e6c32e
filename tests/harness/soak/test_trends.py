from __future__ import annotations

import numpy as np
import pytest

from tests.harness.soak.trends import Sample, Trend, trends_of


def samples_of(quantity: str, values: list[float]) -> list[Sample]:
    return [Sample(at_s=10.0 * k, owner="store", values={quantity: value}) for k, value in enumerate(values)]


def trend_of(quantity: str, values: list[float], warm_up_s: float = 0.0) -> Trend:
    (trend,) = trends_of(samples_of(quantity, values), warm_up_s)
    return trend


def test_noise_and_peaks_are_flat() -> None:
    noise = np.random.default_rng(3).normal(100 << 20, 1 << 20, 100)
    noise[60:65] *= 3
    assert trend_of("rss_bytes", list(noise)).is_flat
    assert trend_of("fds", [20, 20, 25, 20, 20, 20]).is_flat


def test_a_slow_leak_is_seen() -> None:
    noise = np.random.default_rng(3).normal(100 << 20, 1 << 20, 360)
    leak = trend_of("rss_bytes", list(noise + np.linspace(0, 8 << 20, 360)))
    assert not leak.is_flat
    assert leak.growth == pytest.approx(8 << 20, rel=0.1)
    assert not trend_of("threads", [10, 10, 11, 11, 12, 12, 13, 13]).is_flat


def test_a_shrinking_quantity_is_flat() -> None:
    trend = trend_of("used_bytes", [9e8, 8e8, 7e8, 6e8])
    assert trend.is_flat
    assert (trend.first, trend.last, trend.most) == (9e8, 6e8, 9e8)


def test_the_warm_up_does_not_count() -> None:
    assert not trend_of("fds", [1, 5, 9, 13, 13, 13, 13]).is_flat
    assert trend_of("fds", [1, 5, 9, 13, 13, 13, 13], warm_up_s=30).is_flat


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="fds of store: expected at least 2 samples after the warm-up, got 1"):
        trend_of("fds", [1, 2], warm_up_s=5)
