"""Initial weights: golden numbers, an independent scalar reference, and invariance."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.kernels import initialization
from bagpipe.kernels.initialization import InitialWeights, initial_weights, random_words, table_key
from bagpipe.types.schema import RowSchema, RowTable

IDS = np.array([0, 1, 42, 2**63 - 1, -(2**63)], dtype=np.int64)


def reference_integer(seed: int, name: str, row_id: int, column: int) -> int:
    """The draw in [-2**23, 2**23) in plain unsigned Python integers."""
    packed = (seed % 2**64).to_bytes(8, "little") + name.encode()
    key = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    x = (row_id + key) % 2**64
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    low, high = x % 2**32, x >> 32
    y = (low + column * 0x9E3779B9) % 2**32
    y ^= y >> 16
    y = y * 0x7FEB352D % 2**32
    y ^= high
    y ^= y >> 15
    y = y * 0x846CA68B % 2**32
    y ^= y >> 16
    draw = y >> 8
    return draw if draw < 2**23 else draw - 2**24


def test_golden() -> None:
    table = RowTable(name="user", dim=4, init_bound=float(2**23))  # scale 1: the integers themselves
    got = initial_weights(table, IDS, seed=7).numpy().astype(np.int64).tolist()
    assert got == [
        [6379781, -5863733, 7557854, 6063405],  # id 0
        [-521972, -5858441, 1365936, -3173278],  # id 1
        [8357828, -802885, -2993267, 220424],  # id 42
        [-1441325, -605487, -221541, 3962235],  # id 2**63 - 1
        [-5739116, -1604138, 3680175, -5289739],  # id -(2**63)
    ]


@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8), st.integers(-(2**63), 2**63 - 1), st.floats(1e-6, 10))
def test_equals_scalar_reference(seed: int, name: str, row_id: int, bound: float) -> None:
    table = RowTable(name=name, dim=5, init_bound=bound)
    draws = np.array([reference_integer(seed, name, row_id, column) for column in range(5)])
    ids = np.array([row_id], dtype=np.int64)
    for dtype in ("float32", "float64"):
        got = initial_weights(table, ids, seed=seed, dtype=dtype).numpy()[0]
        np.testing.assert_array_equal(got, draws.astype(dtype) * np.array(bound / 2**23).astype(dtype))


def test_value_depends_on_nothing_else() -> None:
    """A weight does not depend on other rows, the width of the table or the strides of the output."""
    table = RowTable(name="t", dim=48, init_bound=0.1)
    ids = np.arange(1000, dtype=np.int64) * 1_000_003
    together = initial_weights(table, ids, seed=1)
    alone = torch.cat([initial_weights(table, ids[i : i + 1], seed=1) for i in range(0, 1000, 37)])
    assert torch.equal(together[::37], alone)
    narrow = initial_weights(RowTable(name="t", dim=16, init_bound=0.1), ids, seed=1)
    assert torch.equal(together[:, :16], narrow)
    schema = RowSchema(tables=(RowTable(name="x", dim=48), table), optimizer="adagrad", seed=1)
    record = torch.zeros(1000, 96)
    tables = torch.ones(1000, dtype=torch.int64)
    InitialWeights(schema, torch.device("cpu")).fill_(record[:, :48], tables, torch.from_numpy(ids))
    assert torch.equal(record[:, :48], together)
    assert not record[:, 48:].any()


def test_tables_mixed_in_one_call() -> None:
    tables = (RowTable(name="a", dim=3, init_bound=1.0), RowTable(name="b", dim=3, init_bound=0.5))
    schema = RowSchema(tables=tables, optimizer="sgd", seed=3)
    out = torch.empty(4, 3)
    ids = np.array([5, 5, 6, 6], dtype=np.int64)
    numbers = torch.tensor([0, 1, 1, 0])
    InitialWeights(schema, torch.device("cpu")).fill_(out, numbers, torch.from_numpy(ids))
    for row, (number, row_id) in enumerate(zip(numbers.tolist(), ids, strict=True)):
        assert torch.equal(out[row], initial_weights(tables[number], np.array([row_id]), seed=3)[0])


def test_keys_differ() -> None:
    keys = {table_key(seed, name) for seed in range(-5, 20) for name in ("a", "b", "ab", "")}
    assert len(keys) == 25 * 4


@pytest.mark.parametrize("ids", [np.arange(20_000), np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)])
def test_looks_uniform(ids: np.ndarray) -> None:
    values = initial_weights(RowTable(name="t", dim=16, init_bound=1.0), ids, seed=0, dtype="float64").numpy()
    assert values.min() >= -1.0
    assert values.max() < 1.0
    n = values.size  # bounds at about five standard errors
    assert abs(values.mean()) < 5 * np.sqrt(1 / 3 / n)
    assert abs(values.var() - 1 / 3) < 5 * np.sqrt(4 / 45 / n)
    counts, _ = np.histogram(values, bins=64, range=(-1, 1))
    assert np.abs(counts - n / 64).max() < 5 * np.sqrt(n / 64)
    correlation = np.corrcoef(values.T)
    assert np.abs(correlation - np.eye(16)).max() < 5 / np.sqrt(len(ids))
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 5 / np.sqrt(len(ids))
    assert len(np.unique(values[:, 0])) > 0.99 * len(ids)


def test_empty() -> None:
    assert initial_weights(RowTable(name="t", dim=4), np.zeros(0, dtype=np.int64), seed=0).shape == (0, 4)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 4), (1, 1), (300, 16), (2_500, 100), (3, 0)])
def test_host_and_device_draw_the_same_words(num_rows: int, num_columns: int) -> None:
    """Both mixers on one device, in one chunk of the host's and in several."""
    rng = np.random.default_rng(5)
    ids, keys = (torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)) for _ in range(2))
    there = initialization._words_on_device(ids, keys, num_columns)
    assert torch.equal(random_words(ids, keys, num_columns), there)
