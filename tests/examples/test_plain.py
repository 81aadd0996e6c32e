"""The reference of the examples agrees with torchrec's own collections, and every example learns by it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.examples.plain import collections_of, load_initial_values, plain_training, weight_of
from tests.examples.samples import SAMPLES

NUM_BATCHES = 5

sgd = partial(torch.optim.SGD, lr=0.5)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_reference_equals_torchrecs_collections(name):
    """Unsharded, on a CPU, in float32: torchrec's collections return nothing else."""
    sample = SAMPLES[name]
    plain = plain_training(sample.model(), sample.batches(NUM_BATCHES), rows={"*": sgd}, dense=sgd, dtype="float32")
    model = sample.model("cpu")
    load_initial_values(model, sample.model())
    tables = {
        config.name: weight_of(getattr(parent, attribute), config.name)
        for parent, attribute, _, configs in collections_of(model)
        for config in configs
    }
    assert tables.keys() == plain.tables.keys()
    optimizer = sgd(model.parameters())
    for batch, expected in zip(sample.batches(NUM_BATCHES), plain.losses, strict=True):
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, abs=1e-6)
    for table, rows in tables.items():
        torch.testing.assert_close(rows.detach(), plain.tables[table], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_example_learns(name):
    sample = SAMPLES[name]
    batches = sample.batches(60, batch_size=256)
    losses = plain_training(sample.model(), batches, rows=sample.rows, dense=sample.dense, dtype="float32").losses
    assert sum(losses[-10:]) < 0.99 * sum(losses[:10])


@pytest.mark.parametrize("name", SAMPLES)
def test_batches_are_a_function_of_the_seed(name):
    sample = SAMPLES[name]

    def losses(seed: int) -> list[float]:
        return plain_training(sample.model(), sample.batches(2, seed=seed), rows={"*": sgd}, dense=sgd).losses

    assert losses(0) == losses(0) != losses(1)
