"""A killed run of an example, started again with the same loader, ends with the bits of one that was not killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.examples.samples import SAMPLES, Sample
from tests.examples.trained import state_of
from tests.system.forked import CONTEXT

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

NUM_BATCHES = 12
#: The killed run has a checkpoint before this batch for certain, and others are under way.
SAVED_STEP = 5
#: Batches that the killed run has trained.
LAST_STEP = 7


def loader_of(sample: Sample, kind: str) -> Any:
    """All batches: a list, or a loader that can tell its position and return to it."""
    batches = list(sample.batches(NUM_BATCHES))
    return StatefulDataLoader(batches, batch_size=None) if kind == "stateful" else batches


def trained_until_killed(name: str, kind: str, settings: dict[str, Any]) -> None:
    """A process that kills itself after a batch, with others in flight."""
    torch.set_num_threads(1)
    sample = SAMPLES[name]
    with sample.module.make_pipeline(sample.model(), **settings) as pipeline:
        for _ in pipeline.train(loader_of(sample, kind)):
            if pipeline.step == SAVED_STEP:
                pipeline.save()
            if pipeline.step == LAST_STEP:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("name", "kind"), [("two_tower", "list"), *((name, "stateful") for name in SAMPLES)])
def test_a_killed_run_ends_with_the_same_bits(name, kind, redis_server, namespace, tmp_path: Path):
    sample = SAMPLES[name]
    with sample.module.make_pipeline(sample.model(), store="memory://", planner="inline", cache_rows=0) as pipeline:
        losses = [pipeline.loss.item() for _ in pipeline.train(loader_of(sample, kind))]
        expected = state_of(pipeline, sample, losses)
    settings = {
        "store": redis_server.url,
        "namespace": namespace,
        "lookahead": 4,
        "cache_rows": 1500,
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "checkpoint_every": 3,
    }
    killed = CONTEXT.Process(target=trained_until_killed, args=(name, kind, settings))
    killed.start()
    killed.join(100)
    assert killed.exitcode == -signal.SIGKILL
    with sample.module.make_pipeline(sample.model(), **settings) as pipeline:
        losses = [pipeline.loss.item() for _ in pipeline.train(loader_of(sample, kind))]
        found = state_of(pipeline, sample, losses)
    assert 0 < len(losses) <= NUM_BATCHES - SAVED_STEP
    assert losses == expected.losses[-len(losses) :]
    for values, others in ((found.dense, expected.dense), (found.tables, expected.tables)):
        assert values.keys() == others.keys()
        for key, value in values.items():
            assert torch.equal(value, others[key]), key
