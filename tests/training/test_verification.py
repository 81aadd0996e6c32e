"""`run.verify`: real jobs equal the serial reference, changed ones do not, and comparing changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.errors import JobError
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine
from bagpipe.training.verification import TOLERANCES, Verification, Verified, tolerance
from cacher.planning import PlannedData
from tests.system.jobs import change
from trainer.assembly import build_dense, build_engine, build_parts, build_training_model

MakeConfig = Callable[..., Config]

FLOAT64 = {"run__dtype": "float64"}
STAGES = {"pipeline__stages": 2, "pipeline__microbatches": 4}


def disturb(engine: Engine) -> None:
    """One element of one weight of the last stage, by less than its rounding in float32 but more than in float64."""
    *_, weight = engine.dense.parameters.values()
    with torch.no_grad():
        weight.view(-1)[0] += 1e-9 * weight.abs().max()


def run(
    config: Config,
    *,
    meanwhile: Mapping[int, Callable[[Engine], object]] = MappingProxyType({}),
    expected: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Verified | None, str, str]:
    """Train, with a comparison if the job asks for one; its result and the digests.

    Args:
        config: the job.
        meanwhile: by the number of batches trained before, what is done to the job.
        expected: keys of the job with which the reference is made.
    """
    data = PlannedData(config.data, config.run.seed)
    built = build_training_model(config, data.schema)
    dense = build_dense(built)
    parts = build_parts(dataclasses.replace(built, config=change(config, **expected)), dense)
    found = None
    with MemoryStore(built.rows) as store:
        engine = build_engine(built, store, dense=dense, parts=parts)
        engine.dense.model.train()
        with engine.train_in_steps(data.batches("train", built.spec)) as steps:
            while steps.step() is not None:
                if steps.next_batch in meanwhile:
                    steps.flush()
                    meanwhile[steps.next_batch](engine)
                for verification in (part for part in parts if isinstance(part, Verification)):
                    if verification.is_due(steps.next_batch):
                        steps.flush()
                        found = verification.verify(
                            steps.next_batch, holders={}, group=None, gather=lambda value: [value]
                        )
                        assert found == verification.found
                        assert verification.is_recording == (steps.next_batch < config.run.verify)
            steps.end()
        return found, dense_digest(engine.dense.model, engine.dense.optimizer), embedding_digest(store)


@pytest.mark.parametrize(
    ("schema", "model", "values"),
    [
        ("sum", "dlrm", {"pipeline__schedule": "1f1b", "optim__clip_value": 1e-3, "optim__warmup_steps": 4}),
        ("mean", "dcnv2-fuxictr", {"pipeline__schedule": "pipedream", "model__dropout": 0.5, "optim__dense": "adam"}),
        ("sum", "towers", {"pipeline__schedule": "graph", "run__loss_scale": 1024}),
        ("sum", "dlrm", {"pipeline__schedule": "none", "pipeline__stages": 1, "optim__clip_norm": 0.05,
                         "optim__dense": "adamw", "optim__weight_decay": 0.1, "optim__weight_decay_exempt": ("1d",)}),
        ("tasks", "mmoe", {"pipeline__schedule": "pipeoptim", "optim__dense": "adamw", "optim__weight_decay": 0.1,
                           "optim__weight_decay_exempt": ("1d",)}),
        ("sum", "dlrm", {"pipeline__schedule": "spectrain", "pipeline__rows_delay": 1, "optim__dense": "adam"}),
        ("sum", "dlrm", {"pipeline__schedule": "1f1b", "optim__dense": "adam", "dense__budget_bytes": 20000}),
        ("sum", "dlrm", {"pipeline__schedule": "spectrain", "optim__dense": "adam", "dense__state": "host"}),
        ("mean", "dcnv2-fuxictr", {"pipeline__schedule": "spectrain", "pipeline__microbatches": 1,
                                   "model__batch_norm": True, "optim__dense": "sgd", "optim__momentum": 0.9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_job_equals_the_reference(clicks: MakeConfig, schema: str, model: str, values: dict[str, object]) -> None:
    """The last batch has fewer examples than the others, and fewer than two per micro-batch."""
    config = change(clicks(schema, model), **{**FLOAT64, **STAGES, **values, "run__verify": 26})
    found, *_ = run(config)
    assert found is not None
    found.check()
    assert (found.batches, found.tolerance) == (26, 1e-12)
    assert max(found.loss, found.gradients, found.weights) <= 1e-12


def test_comparing_changes_nothing_and_finds_what_differs(clicks: MakeConfig) -> None:
    config = change(clicks(), **{**FLOAT64, **STAGES, "pipeline__schedule": "spectrain-v2"})
    verified = change(config, run__verify=7)
    found, *digests = run(verified)
    assert found is not None
    found.check()
    assert digests == list(run(config)[1:])
    different, *_ = run(verified, meanwhile={7: disturb})
    assert different is not None
    assert 1e-10 < different.weights < 1e-8
    assert max(different.loss, different.gradients) <= 1e-12
    with pytest.raises(
        JobError, match=rf"^run\.verify: the first 7 batches .* dense weights 1\.0e-09 \({different.worst}\)"
    ):
        different.check()


def test_comparing_beside_a_budget_changes_nothing(clicks: MakeConfig) -> None:
    config = change(clicks(), **{**FLOAT64, **STAGES, "pipeline__schedule": "spectrain-v2"})
    budgeted = change(config, dense__budget_bytes=20000)
    found, *digests = run(change(budgeted, run__verify=7))
    assert found is not None
    found.check()
    assert digests == list(run(config)[1:])


def test_float32_has_a_tolerance_of_its_own_and_nan_is_a_difference(clicks: MakeConfig) -> None:
    config = change(clicks(), **{**STAGES, "pipeline__schedule": "pipedream-2bw", "run__verify": 3})
    found, *_ = run(config)
    assert found is not None
    found.check()
    assert found.tolerance == tolerance(torch.float32) == TOLERANCES[torch.float32] == 1e-5
    for wrong in (math.nan, math.inf):
        with pytest.raises(JobError, match=r"^run\.verify"):
            dataclasses.replace(found, weights=wrong).check()


def test_halves_are_compared_up_to_a_few_roundings() -> None:
    assert tolerance(torch.float32, torch.float16) == 2**-8
    assert tolerance(torch.float32, torch.bfloat16) == 2**-5
