"""Shares that a job derives from its own activations."""

from __future__ import annotations

import pytest

from bagpipe.config.ranges import NumberText
from bagpipe.errors import InputError
from tests.trainer.test_stages import staged
from trainer.stages import StagedJob

PIPELINE = {"schedule": "1f1b", "stages": 3, "microbatches": 8, "recompute": True}


def counts(job: StagedJob) -> list[int]:
    """Micro-batches that each stage recomputes."""
    found = [0] * job.mesh.step.graph.num_stages
    for atom in job.mesh.step.program.atoms():
        if atom.op == "REC":
            found[atom.stage] += 1
    return found


def test_everything_a_given_share_or_the_least() -> None:
    assert counts(staged(**PIPELINE)) == [8, 8, 8]
    assert counts(staged(**PIPELINE, recompute_share=NumberText("0.5,0.25,0"))) == [4, 2, 0]
    assert counts(staged(**PIPELINE, recompute_share=NumberText("1"))) == [8, 8, 0], "as Merak: none on the last stage"
    assert counts(staged(**{**PIPELINE, "recompute": False})) == [0, 0, 0]
    shifted = {**PIPELINE, "schedule": "1f1b-shifted", "recompute": False}
    assert counts(staged(**shifted)) == [8, 8, 0]
    assert counts(staged(**shifted, recompute_share=NumberText("0.5,0,1"))) == [4, 0, 8]


def test_auto_fits_the_ranks_into_the_bytes() -> None:
    free = staged(**PIPELINE, recompute_share=NumberText("auto"), activation_bytes=10**9)
    assert set(free.recomputed.values()) == {0}
    peaks = []
    for limit in (60_000, 50_000, 40_000):
        job = staged(**PIPELINE, recompute_share=NumberText("auto"), activation_bytes=limit)
        peaks.append(sum(counts(job)))
        assert list(job.recomputed.values()) == [count / 8 for count in counts(job)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    with pytest.raises(InputError, match=r"pipeline.activation_bytes 10: stage 0 is on a rank that keeps \d+ bytes of"):
        staged(**PIPELINE, recompute_share=NumberText("auto"), activation_bytes=10)


def test_other_replicas_have_fewer_examples_and_recompute_less() -> None:
    text = NumberText("auto")
    one, two = (staged(ranks, **PIPELINE, recompute_share=text, activation_bytes=40_000) for ranks in (3, 6))
    assert sum(counts(two)) < sum(counts(one))
