"""torchrec's pipeline and `bagpipe.TrainPipeline` give the same losses, from programs that differ in few lines."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks
from tests.examples.plain import plain_training
from tests.examples.samples import SAMPLES
from tests.examples.trained import piped_training

NAMES = ("torchrec_train.py", "bagpipe_train.py")
NUM_BATCHES, BATCH_SIZE = 20, 64


@pytest.fixture(scope="module")
def torchrec_losses() -> list[float]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.examples.torchrec_losses",
        str(NUM_BATCHES),
        str(BATCH_SIZE),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)
    return losses


def test_torchrec_equals_the_reference(torchrec_losses):
    """Both are float32, and sum in other orders."""
    sample = SAMPLES["dlrm_swap.bagpipe_train"]
    batches = sample.batches(NUM_BATCHES, BATCH_SIZE)
    plain = plain_training(sample.model(), batches, rows=sample.rows, dense=sample.dense, dtype="float32")
    assert torchrec_losses == pytest.approx(plain.losses, rel=1e-5)


def test_both_pipelines_give_the_same_losses(torchrec_losses):
    sample = SAMPLES["dlrm_swap.bagpipe_train"]
    batches = sample.batches(NUM_BATCHES, BATCH_SIZE)
    piped = piped_training(sample, batches, store="memory://", planner="inline", cache_rows=1000)
    assert piped.losses == pytest.approx(torchrec_losses, rel=1e-5)


def test_the_readme_shows_the_whole_difference():
    """To renew the block: paste what this test expects."""
    old, new = ((ROOT / "examples/dlrm_swap" / name).read_text(encoding="utf-8") for name in NAMES)
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), *NAMES, n=1)
    (shown,) = blocks("examples/README.md", "diff")
    assert shown == "".join(lines)
