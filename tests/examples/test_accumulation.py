"""The examples' collections of all kinds take two batches a step as plain PyTorch takes both together."""

from __future__ import annotations

import pytest
import torch

from tests.examples.plain import doubled, plain_training
from tests.examples.samples import SAMPLES
from tests.examples.trained import piped_training

NUM_STEPS = 6


@pytest.mark.parametrize("cache_rows", [0, 2000], ids=["direct", "cached"])
@pytest.mark.parametrize("name", SAMPLES)
def test_two_batches_a_step_equal_plain_pytorch(name, cache_rows):
    sample = SAMPLES[name]
    batches = list(sample.batches(2 * NUM_STEPS))
    plain = plain_training(sample.model(), batches, rows=sample.rows, dense=sample.dense, num_parts=2)
    piped = piped_training(
        sample,
        [doubled(batch) for batch in batches],
        dtype="float64",
        store="memory://",
        planner="inline",
        lookahead=4,
        cache_rows=cache_rows,
        accumulate=2,
    )
    of_steps = [sum(piped.losses[first : first + 2]) / 2 for first in range(0, len(piped.losses), 2)]
    assert of_steps == pytest.approx(plain.losses, rel=0, abs=1e-7)  # torchrec's DLRMTrain has its loss in float32
    for kind in ("dense", "tables"):
        expected = getattr(plain, kind)
        for key, value in getattr(piped, kind).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-11)
