"""`run.verify` beside other ways to run and step stages: jobs equal the reference, and one wrong value is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.stage.mesh import held_stages
from bagpipe.testing.local_peers import LocalPeers
from bagpipe.training.dense import DensePart
from bagpipe.training.engine import Engine
from bagpipe.training.part import LoopPart
from bagpipe.training.progress import RunResult
from bagpipe.training.staged_dense import StagedDense
from bagpipe.training.verification import Verification, Verified
from tests.effort import some_of
from tests.system.jobs import change
from tests.system.rank_threads import run_ranks
from tests.training.test_verification import FLOAT64, STAGES, MakeConfig, disturb, run
from trainer.assembly import BuiltModel, build_parts

#: All batches of the log. The last one has fewer examples than the others, and fewer than two per micro-batch.
ALL = 26
KFAC: Mapping[str, Any] = {"optim__precondition": "kfac", "optim__kfac_inverse_every": 2, "optim__kfac_damping": 0.1}
LAGGING = {**KFAC, "optim__kfac_lag": 1, "optim__kfac_factor_every": 2, "optim__kfac_inverse_every": 3}
POISONED = {"model__factory": "tests.harness.fuzz.models:poisoned", "run__nonfinite": "skip"}
LIMITED = {"optim__clip_norm": 0.05, "optim__clip_scope": "all"}
DROPOUT = {"model__name": "dcnv2-fuxictr", "model__dropout": 0.5}
GROWING = {
    "run__dtype": "float32", "run__autocast": "float16", "run__nonfinite": "skip", "run__loss_scale": 2**19,
    "run__loss_scale_growth_interval": 3,
}  # fmt: skip

#: Schedule, and what varies besides.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "unlike replicas": ("1f1b", {"pipeline__replicas": "2,1"}),
    "unlike replicas, dropout": ("1f1b", {"pipeline__replicas": "2,3", **DROPOUT}),
    "unlike replicas, versions": ("pipedream", {"pipeline__replicas": "1,2", "optim__dense": "adam"}),
    "two directions": ("chimera", DROPOUT),
    "micro-batches of two sizes": ("graph", {"pipeline__stage_microbatches": "2,4", **DROPOUT}),
    "partial backward": ("1f1b", {"pipeline__backward_shares": "0.5,1"}),
    "partial backward of two directions": ("chimera", {"pipeline__backward_shares": "0,1"}),
    "partial backward by replicas": (
        "spectrain",
        {"pipeline__backward_shares": "0,0.5,1", "pipeline__backward_unit": "rank", "optim__dense": "adam"},
    ),
    "partial backward, versions": ("pipedream", {"pipeline__backward_shares": "0,0.5,1", "pipeline__replicas": "2,1"}),
    "K-FAC": ("1f1b", {**KFAC, "optim__kfac_kappa": 0.01}),
    "K-FAC of the batch before": ("zb-h1", LAGGING),
    "K-FAC of owners' examples": ("1f1b", {**KFAC, "optim__kfac_factors": "local", "pipeline__replicas": "2,1"}),
    "K-FAC of two directions": ("chimera", {**KFAC, "optim__kfac_factors": "local"}),
    "K-FAC, partial backward, versions": ("pipedream", {**KFAC, "pipeline__backward_shares": "0,0.5,1"}),
    "batches left out": ("1f1b", POISONED),
    "batches left out, versions": ("pipedream-2bw", {**POISONED, "optim__dense": "adam"}),
    "batches left out, predictions": ("spectrain", {**POISONED, "optim__dense": "sgd", "optim__momentum": 0.9}),
    "limit of the norm": ("1f1b", LIMITED),
    "limit of the norm of rows": ("zb-h1", {**LIMITED, "optim__clip_scope": "rows"}),
    "limit of the norm, versions": ("pipedream", {**LIMITED, "optim__clip_scope": "dense"}),
    "limit of the norm, partial backward": ("gpipe", {**LIMITED, "pipeline__backward_shares": "0,1"}),
    "growing loss scale": ("1f1b", GROWING),
    "growing loss scale, norm, replicas": ("1f1b", {**GROWING, **LIMITED, "pipeline__replicas": "2,1"}),
    "growing loss scale, chunks": ("1f1b", {**GROWING, "dense__budget_bytes": 20000}),
    "halves": ("zb-h1", {"run__dtype": "float32", "run__autocast": "bfloat16", "optim__dense": "adam"}),
}  # fmt: skip


def config_of(clicks: MakeConfig, schedule: str, values: Mapping[str, Any]) -> Config:
    own = {**FLOAT64, **STAGES, "model__name": "dcnv2", **values, "pipeline__schedule": schedule, "run__verify": ALL}
    return change(clicks("mean", "dcnv2"), **own)


@pytest.mark.parametrize("name", some_of([*JOBS], {n for n, name in enumerate(JOBS) if "norm, v" not in name}))
def test_a_job_equals_the_reference(clicks: MakeConfig, name: str) -> None:
    schedule, values = JOBS[name]
    found, *_ = run(config_of(clicks, schedule, values))
    assert found is not None
    found.check()
    assert found.batches == ALL
    assert (0 < found.left_out < ALL) == (values.get("run__nonfinite") == "skip")


def wrong_rotation(engine: Engine) -> None:
    """Backwards of a batch as if it came one later."""
    assert isinstance(engine.dense, StagedDense)
    assert engine.dense.pipeline.partial_backward is not None
    engine.dense.pipeline.partial_backward.earlier += 1


def wrong_factor(engine: Engine) -> None:
    """A thousandth more in a factor of K-FAC."""
    assert engine.dense.preconditioning is not None
    kfac = next(iter(engine.dense.preconditioning.kfacs.values()))
    next(tensor for name, tensor in kfac.tensors(3).items() if name.endswith("factor_a")).mul_(1.001)


def wrong_limit(engine: Engine) -> None:
    engine.dense.clip = dataclasses.replace(engine.dense.clip, norm=0.06)


def right_limit(engine: Engine) -> None:
    engine.dense.clip = dataclasses.replace(engine.dense.clip, norm=0.05)


def wrong_scale(engine: Engine) -> None:
    engine.dense.loss_scale = dataclasses.replace(engine.dense.loss_scale, value=engine.dense.loss_scale.value / 2)


def break_weights(engine: Engine) -> None:
    """The next batch is bad for the job alone."""
    *_, weight = engine.dense.parameters.values()
    engine.dense.model.register_buffer("kept", weight.detach().clone(), persistent=False)
    with torch.no_grad():
        weight.fill_(math.nan)


def mend_weights(engine: Engine) -> None:
    *_, weight = engine.dense.parameters.values()
    with torch.no_grad():
        weight.copy_(engine.dense.model.get_buffer("kept"))


#: Schedule and keys, what is wrong after how many batches, and the quantities that tell.
WRONG: dict[str, tuple[str, dict[str, Any], dict[int, Callable[[Engine], object]], str]] = {
    "unlike replicas": ("1f1b", {"pipeline__replicas": "2,1"}, {3: disturb}, "loss gradients weights"),
    "two directions": ("chimera", {}, {3: disturb}, "loss gradients weights"),
    "partial backward": (
        "1f1b", {"pipeline__backward_shares": "0.5,1"}, {3: wrong_rotation}, "gradients weights"
    ),
    "K-FAC": ("1f1b", {**KFAC}, {3: wrong_factor}, "loss gradients weights"),
    "batches left out": ("1f1b", POISONED, {3: break_weights, 4: mend_weights}, "loss"),
    "limit of the norm": ("1f1b", LIMITED, {3: wrong_limit, 4: right_limit}, "gradients weights"),
    "limit of the norm of rows": (
        "1f1b", {**LIMITED, "optim__clip_scope": "rows"}, {3: wrong_limit, 4: right_limit}, "gradients"
    ),
    "growing loss scale": ("1f1b", GROWING, {2: wrong_scale}, "gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_value_is_found(clicks: MakeConfig, name: str) -> None:
    schedule, values, meanwhile, tells = WRONG[name]
    config = change(config_of(clicks, schedule, values), data__limit=100, run__verify=8)
    found, *_ = run(config, meanwhile=meanwhile)
    assert found is not None
    for quantity in tells.split():
        assert getattr(found, quantity) > found.tolerance
    right, *_ = run(config)
    assert right is not None
    right.check()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**KFAC}, {"optim__kfac_damping": 0.1001}),
        ({**LAGGING}, {"optim__kfac_lag": 0}),
        ({**KFAC, "optim__kfac_kappa": 1e-3}, {"optim__kfac_kappa": 1.01e-3}),
        ({**GROWING}, {"optim__dense_lr": 0.1}),
    ],
)
def test_a_reference_with_one_other_number_differs(
    clicks: MakeConfig, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    """But for the rate, which is recorded: so a job with another one in its optimizer equals the reference."""
    config = change(config_of(clicks, "1f1b", values), data__limit=100, run__verify=8)
    found, *_ = run(config, expected=expected)
    assert found is not None
    assert (found.weights > found.tolerance) == ("optim__dense_lr" not in expected)


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_compiled_job(clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, backend: str, autocast: str) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    dtype = "float64" if autocast == "off" else "float32"
    values = {"run__compile": True, "run__dtype": dtype, "run__autocast": autocast}
    config = change(config_of(clicks, "1f1b", values), data__limit=100, run__verify=8)
    found, *_ = run(config)
    assert found is not None
    found.check()
    if autocast == "off":
        different, *_ = run(config, meanwhile={8: disturb})
        assert different is not None
        assert different.weights > different.tolerance


def verified(
    config: Config,
    world_size: int,
    spoil: Callable[[LocalPeers, Engine], object] = lambda peer, engine: None,
    **expected: object,
) -> Verified:
    """The comparison of a job of ranks in threads after eight batches.

    Args:
        config: the job.
        world_size: ranks.
        spoil: called on each rank after three batches.
        expected: keys of the job with which the reference is made.
    """
    parts: dict[int, Verification] = {}
    found: list[Verified] = []

    def make_parts(built: BuiltModel, dense: DensePart) -> tuple[LoopPart, ...]:
        own = build_parts(dataclasses.replace(built, config=change(built.config, **expected)), dense)
        parts[id(dense)] = next(part for part in own if isinstance(part, Verification))
        return own

    def train(peer: LocalPeers, engine: Engine, batches: Iterator[RankBatch]) -> RunResult:
        assert isinstance(engine.dense, StagedDense)
        held = held_stages(engine.dense.pipeline.staged, engine.dense.pipeline.mesh)
        verification = parts[id(engine.dense)]
        holders = {name: stage.holders[0] for stage in held for name, _ in stage.parameters}
        with engine.train_in_steps(batches) as steps:
            while steps.step() is not None:
                is_due = verification.is_due(steps.next_batch)
                if is_due or steps.next_batch == 3:
                    steps.flush()
                    peer.gather(None)
                if steps.next_batch == 3:
                    spoil(peer, engine)
                if is_due:
                    verification.verify(steps.next_batch, holders=holders, group=peer.dense, gather=peer.gather)
            assert verification.found is not None
            found.append(verification.found)
            return steps.end()

    run_ranks(change(config, data__limit=100, run__verify=8), world_size, train=train, make_parts=make_parts)
    assert all(each == found[0] for each in found)
    assert len(found) == world_size
    return found[0]


#: Ranks, schedule, and what varies besides.
RANKS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "unlike replicas": (3, "1f1b", {"pipeline__replicas": "2,1", **DROPOUT}),
    "unlike replicas, twice": (6, "1f1b", {"pipeline__replicas": "1,2"}),
    "two directions": (4, "chimera", DROPOUT),
    "partial backward": (4, "1f1b", {"pipeline__backward_shares": "0,1", "pipeline__backward_unit": "rank"}),
    "partial backward, unlike replicas": (
        3, "pipedream", {"pipeline__backward_shares": "0,0.5,1", "pipeline__replicas": "2,1"}
    ),
    "K-FAC": (4, "1f1b", {**KFAC}),
    "K-FAC of owners' examples": (4, "zb-h1", {**LAGGING, "optim__kfac_factors": "local"}),
    "K-FAC of owners' examples, unlike replicas": (
        3, "1f1b", {**KFAC, "optim__kfac_factors": "local", "pipeline__replicas": "2,1"}
    ),
    "batches left out": (2, "1f1b", POISONED),
    "limit of the norm": (4, "1f1b", LIMITED),
    "growing loss scale": (2, "1f1b", GROWING),
    "K-FAC, shares": (4, "1f1b", {**KFAC, "dense__shard": "gradients"}),
    "growing loss scale, shares": (4, "1f1b", {**GROWING, **LIMITED, "dense__shard": "parameters"}),
}  # fmt: skip


@pytest.mark.parametrize("name", some_of([*RANKS], set(range(len(RANKS))) - {1, 3, 5, 11}))
def test_a_job_of_ranks_equals_the_reference(clicks: MakeConfig, name: str) -> None:
    world_size, schedule, values = RANKS[name]
    verified(config_of(clicks, schedule, values), world_size).check()


@pytest.mark.parametrize("values", [{"pipeline__replicas": "2,1"}, {}])
def test_factors_of_all_examples_are_not_those_of_an_owner(clicks: MakeConfig, values: dict[str, Any]) -> None:
    config = config_of(clicks, "1f1b", {**KFAC, **values, "optim__kfac_factors": "local"})
    found = verified(config, 3 if values else 4, optim__kfac_factors="summed")
    assert found.weights > found.tolerance


def test_a_rank_with_other_weights_is_found(clicks: MakeConfig) -> None:
    """The second of two ranks with the first stage, whose weights nobody reads."""

    def spoil(peer: LocalPeers, engine: Engine) -> None:
        if peer.rank == 1:
            weight = next(iter(engine.dense.parameters.values()))
            with torch.no_grad():
                weight.view(-1)[0] += 1e-9 * weight.abs().max()

    config = config_of(clicks, "1f1b", {"pipeline__replicas": "2,1"})
    found = verified(config, 3, spoil)
    assert min(found.loss, found.gradients, found.weights) > found.tolerance
