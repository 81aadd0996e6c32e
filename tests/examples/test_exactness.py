"""The examples train as in plain PyTorch, and the cache changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.examples.plain import Trained, collections_of, doubled, jagged_tensors, plain_training
from tests.examples.samples import SAMPLES, Sample
from tests.examples.trained import piped_training

NUM_BATCHES = 12


@pytest.mark.parametrize("cached", [False, True], ids=["direct", "cached"])
@pytest.mark.parametrize("name", SAMPLES)
def test_training_equals_plain_pytorch(name, cached):
    sample = SAMPLES[name]
    batches = list(sample.batches(NUM_BATCHES))
    plain = plain_training(sample.model(), batches, rows=sample.rows, dense=sample.dense)
    piped = piped_training(
        sample,
        [doubled(batch) for batch in batches],
        dtype="float64",
        store="memory://",
        planner="inline",
        lookahead=4,
        cache_rows=few_rows(sample, batches) if cached else 0,
    )
    assert piped.losses == pytest.approx(plain.losses, abs=1e-12, rel=0)
    assert_equal(piped, plain, atol=1e-12)


@pytest.mark.redis
@pytest.mark.parametrize("name", SAMPLES)
def test_the_cache_changes_no_bit(name):
    """The reference has no cache. The other run evicts, plans in a process, and has its rows in a server."""
    sample = SAMPLES[name]
    batches = list(sample.batches(NUM_BATCHES))
    direct = piped_training(sample, batches, store="memory://", planner="inline", cache_rows=0)
    cached = piped_training(sample, batches, lookahead=5, cache_rows=few_rows(sample, batches))
    assert cached.losses == direct.losses
    assert_equal(cached, direct, atol=0)


def few_rows(sample: Sample, batches: Sequence[Any]) -> int:
    """A cache in which the largest batch has half as much room again; less than all batches need."""
    tables = {
        feature: config.name
        for _, _, _, configs in collections_of(sample.model())
        for config in configs
        for feature in config.feature_names
    }
    per_batch = [
        {
            (tables[key], row)
            for jagged in jagged_tensors(batch)
            for key, bags in jagged.to_dict().items()
            for row in bags.values().tolist()
        }
        for batch in batches
    ]
    few = max(map(len, per_batch)) * 3 // 2
    assert few < len(set.union(*per_batch))
    return few


def assert_equal(found: Trained, expected: Trained, *, atol: float) -> None:
    for kind in ("dense", "tables"):
        values, others = getattr(found, kind), getattr(expected, kind)
        assert values.keys() == others.keys()
        for name, value in values.items():
            torch.testing.assert_close(
                value, others[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
