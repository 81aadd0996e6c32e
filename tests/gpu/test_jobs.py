"""Whole jobs on the device: reproducible bits for any cache, and the CPU's values within rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.jobs import EVERY_ROW, JOBS, Outcome, run_plain, smallest_cache

pytestmark = pytest.mark.gpu


def assert_close(one: Outcome, other: Outcome, *, rtol: float, atol: float) -> None:
    assert one.dense.keys() == other.dense.keys()
    for name, value in one.dense.items():
        torch.testing.assert_close(value, other.dense[name], rtol=rtol, atol=atol)
    for rows, others in zip(one.rows, other.rows, strict=True):
        np.testing.assert_allclose(rows, others, rtol=rtol, atol=atol)
    assert one.loss_sum == pytest.approx(other.loss_sum, rel=max(rtol, 1e-12))


@pytest.mark.parametrize(("shape", "rows"), JOBS)
def test_the_same_seed_gives_the_same_bits(device: str, shape: str, rows: str) -> None:
    cache_rows = smallest_cache(shape)
    first, second = (run_plain(shape, device=device, rows=rows, cache_rows=cache_rows, dim=16) for _ in range(2))
    assert (first.digests, first.loss_sum) == (second.digests, second.loss_sum)


@pytest.mark.parametrize("lookahead", [1, 6])
@pytest.mark.parametrize(("shape", "rows"), JOBS)
def test_cached_equals_direct(device: str, shape: str, rows: str, lookahead: int) -> None:
    direct = run_plain(shape, device=device, rows=rows, cache_rows=0, dim=16)
    for cache_rows in (smallest_cache(shape), 2 * smallest_cache(shape), EVERY_ROW):
        cached = run_plain(shape, device=device, rows=rows, cache_rows=cache_rows, lookahead=lookahead, dim=16)
        assert (cached.digests, cached.loss_sum) == (direct.digests, direct.loss_sum), cache_rows


@pytest.mark.parametrize("dim", [4, 48, 128])
def test_cached_equals_direct_at_other_widths(device: str, dim: int) -> None:
    digests = [
        run_plain("multi-hot", device=device, rows="adagrad", cache_rows=cache_rows, dim=dim).digests
        for cache_rows in (0, smallest_cache("multi-hot"))
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("shape", "rows"), JOBS)
def test_the_device_gives_the_cpus_values(device: str, shape: str, rows: str) -> None:
    """Only the order of sums over examples and of matrix products differs."""
    cache_rows = smallest_cache(shape)
    for dtype, rtol, atol in (("float64", 1e-10, 1e-12), ("float32", 1e-3, 1e-5)):
        here, there = (
            run_plain(shape, device=where, rows=rows, cache_rows=cache_rows, dim=16, dtype=dtype)
            for where in (device, "cpu")
        )
        assert_close(here, there, rtol=rtol, atol=atol)


def test_initial_rows_are_equal_on_every_device(device: str) -> None:
    """Initial values are a pure function of seed, table, id and column: equal bits on every device."""
    here, there = (run_plain("one-hot", device=where, rows_lr=0.0, dim=48) for where in (device, "cpu"))
    assert here.digests[1] == there.digests[1]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("row_dtype", ["float16", "bfloat16", {"C1": "float16", "C3": "bfloat16"}])
def test_cached_equals_direct_with_half_rows(device: str, row_dtype: Any, kernels: str) -> None:
    """Stochastic rounding draws from row id and step, not from slots. Tables of several dtypes share the slots."""
    digests = {
        run_plain(
            "multi-hot", device=device, rows="adagrad", cache_rows=rows, dim=16, row_dtype=row_dtype, kernels=kernels
        ).digests
        for rows in (0, smallest_cache("multi-hot"), EVERY_ROW)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("shape", "rows"), JOBS)
def test_cached_equals_direct_with_torchs_kernels(device: str, shape: str, rows: str) -> None:
    """The fallback of devices without Triton kernels; results agree with those of Triton within rounding."""
    direct = run_plain(shape, device=device, rows=rows, dim=16, kernels="torch")
    cached = run_plain(shape, device=device, rows=rows, cache_rows=smallest_cache(shape), dim=16, kernels="torch")
    assert cached.digests == direct.digests
    assert_close(run_plain(shape, device=device, rows=rows, dim=16), direct, rtol=1e-3, atol=1e-5)
