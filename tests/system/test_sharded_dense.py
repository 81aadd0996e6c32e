"""Jobs whose dense part is divided among the ranks end with the bits of replicated ones, resumed on any level too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.dense_state import PART, RNG, DenseState, combine, load
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.sections import Config
from bagpipe.dense.chunks import chunked_model
from bagpipe.distributed.membership import Membership
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.training.earlier_rows import KeptRows
from tests.dense.chunks.poison import PoisonedArena
from tests.system.resumed import JOB, Resumed
from tests.system.test_ranks import run_to_the_end, whole_job
from tests.system.test_resume_ranks import STAGES, config_of, numbers, ranks_that_die

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

ROUND = ["--optim.weight_decay_exempt", "1d", "--eval.every", "7"]
#: Bytes of a budget that holds a part of what a rank has.
BUDGET = "8000"
SLOW, COMPILING = pytest.mark.slow, pytest.mark.timeout(600)
COMPILED_STAGES = [*STAGES, "--run.compile", "true"]
EMA = ["--optim.ema_decay", "0.9", "--optim.ema_evaluate", "true"]

#: Ranks, level, wrap rule, and what varies besides: models, dtypes, optimizers, evaluations, batches to leave out.
JOBS = [
    (2, "parameters", "", ["--model.name", "dcnv2", "--optim.dense", "adam", "--run.nonfinite", "skip", *ROUND[2:]]),
    pytest.param(
        4,
        "gradients",
        "",
        ["--run.dtype", "float64", "--optim.momentum", "0.9", "--optim.dense", "sgd"],
        marks=pytest.mark.slow,
    ),
    (2, "parameters", "", ["--model.name", "deepfm", *EMA, "--eval.every", "7"]),
    pytest.param(2, "optimizer", "", ["--model.name", "deepfm", *EMA], marks=pytest.mark.slow),
    (2, "optimizer", "", ["--model.name", "dcnv2", "--optim.precondition", "kfac", "--run.nonfinite", "skip"]),
    pytest.param(
        2, "parameters", "", ["--optim.precondition", "kfac", "--run.loss_scale", "8"], marks=pytest.mark.slow
    ),
    pytest.param(2, "parameters", "", ["--run.compile", "true", "--optim.dense", "adam"], marks=pytest.mark.slow),
    pytest.param(2, "gradients", "", ["--run.compile", "true"], marks=pytest.mark.slow),
    pytest.param(4, "parameters", "", [*COMPILED_STAGES, "--optim.dense", "adam"], marks=pytest.mark.slow),
    pytest.param(4, "gradients", "", COMPILED_STAGES, marks=pytest.mark.slow),
    (4, "parameters", "", [*STAGES, "--run.verify", "4", "--eval.every", "7"]),
    pytest.param(
        4,
        "optimizer",
        "",
        ["--pipeline.schedule", "spectrain", *STAGES[2:], "--run.verify", "4"],
        marks=pytest.mark.slow,
    ),
    pytest.param(
        4,
        "parameters",
        "*mlp*,*deep*",
        ["--model.name", "wide-deep", "--optim.dense", "adamw", "--optim.weight_decay", "0.01", *ROUND],
        marks=pytest.mark.slow,
    ),
]


def run(arguments: list[str], world_size: int, *more: str) -> tuple[object, ...]:
    return numbers(run_to_the_end(config_of([*JOB, *arguments, *more]), world_size))


@pytest.mark.parametrize(("world_size", "level", "wrap", "arguments"), JOBS)
def test_bits_do_not_depend_on_the_level(world_size: int, level: str, wrap: str, arguments: list[str]) -> None:
    own = ["--dense.shard", level, *(["--dense.wrap", wrap] if wrap else [])]
    assert run(arguments, world_size, *own) == run(arguments, world_size)


def poisoned_job(membership: Membership, config: Config) -> dict[str, Any]:
    """One rank, whose chunks are overwritten wherever nobody may read them."""
    chunked_model.Arena = PoisonedArena  # type: ignore[misc]
    return whole_job(membership, config)


@pytest.mark.parametrize(
    ("world_size", "level", "arguments"),
    [
        (2, "parameters", ["--optim.dense", "adam", "--run.nonfinite", "skip", *EMA]),
        (2, "gradients", ["--optim.dense", "adam", *EMA, "--optim.clip_norm", "0.02", "--optim.clip_scope", "all"]),
        pytest.param(2, "gradients", ["--optim.dense", "adam", "--run.compile", "true"], marks=[SLOW, COMPILING]),
        pytest.param(2, "parameters", ["--optim.dense", "adam", "--run.compile", "true"], marks=[SLOW, COMPILING]),
        pytest.param(4, "optimizer", ["--run.dtype", "float64", *ROUND[2:]], marks=pytest.mark.slow),
        pytest.param(2, "optimizer", ["--model.name", "deepfm", "--optim.clip_value", "0.01"], marks=pytest.mark.slow),
    ],
)
def test_a_budget_beside_shares_changes_no_bit(world_size: int, level: str, arguments: list[str]) -> None:
    own = ["--dense.shard", level, "--dense.budget_bytes", BUDGET]
    found = run_to_the_end(config_of([*JOB, *arguments, *own]), world_size, poisoned_job)
    assert numbers(found) == run(arguments, world_size, "--dense.shard", level)


@pytest.mark.parametrize("scope", ["dense", "all"])
def test_a_limit_of_the_norm_is_that_of_whole_gradients(scope: str) -> None:
    """Squares of shares are added up: the last bits of a norm are other ones than without shares, on all levels."""
    keys = ["--optim.clip_norm", "0.02", "--optim.clip_scope", scope, "--run.dtype", "float64", "--data.limit", "400"]
    levels = [run(keys, 2, "--dense.shard", level) for level in ("optimizer", "parameters")]
    assert levels[0] == levels[1] == run(keys, 2, "--dense.shard", "gradients", "--cache.rows", "0")
    plain, unlimited = (run_to_the_end(config_of([*JOB, *given]), 2)[0] for given in (keys, keys[4:]))
    divided = run_to_the_end(config_of([*JOB, *keys, "--dense.shard", "gradients"]), 2)[0]
    assert divided["loss"] == pytest.approx(plain["loss"], rel=1e-12)
    assert unlimited["loss"] != pytest.approx(plain["loss"], rel=1e-6)


def dense_of(folder: Path) -> DenseState:
    """The joined dense part of the newest checkpoint, without random states and rows, which any rank can have."""
    found = CheckpointFolder(folder).chosen("auto", lambda line: None)
    assert found is not None
    state = combine(load(found.folder, part.dense) for part in found.manifest.parts)
    assert not state.pieces
    left = (RNG, f"{PART}{KeptRows.name}.")
    tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(left)}
    return DenseState(tensors=tensors, values=state.values)


def test_killed_and_resumed_with_another_budget(server: EmbeddedServer, tmp_path: Path) -> None:
    adam = ["--optim.dense", "adam"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *adam])
    ranks_that_die(
        job.settings("--dense.shard", "gradients", "--dense.budget_bytes", BUDGET), "after-checkpoint-data:2"
    )
    ranks_that_die(job.settings("--dense.shard", "parameters", "--dense.state", "host"), "after-checkpoint-data:2")
    results = run_to_the_end(config_of(job.settings("--dense.shard", "optimizer", "--dense.budget_bytes", BUDGET)), 2)
    assert numbers(results) == run(adam, 2)
    assert results[0]["resumed_from"] > 0


@pytest.mark.parametrize(
    "more", [(), pytest.param(EMA, marks=SLOW), pytest.param(["--run.compile", "true"], marks=SLOW)]
)
def test_killed_and_resumed_on_other_levels(server: EmbeddedServer, tmp_path: Path, more: Sequence[str]) -> None:
    store = ["--store.url", server.url, *more]
    plain = Resumed(folder=tmp_path / "plain", arguments=store)
    expected = numbers(run_to_the_end(config_of(plain.settings()), 2))
    job = Resumed(folder=tmp_path / "divided", arguments=store)
    ranks_that_die(job.settings("--dense.shard", "parameters"), "after-checkpoint-data:2")
    ranks_that_die(job.settings("--dense.shard", "optimizer"), "after-checkpoint-data:2")
    results = run_to_the_end(config_of(job.settings("--dense.shard", "gradients")), 2)
    assert numbers(results) == expected
    assert results[0]["resumed_from"] > 0
    assert dense_of(job.checkpoints).digest() == dense_of(plain.checkpoints).digest(), "exports read the same"


@pytest.mark.parametrize(
    "level", ["parameters", pytest.param("optimizer", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)]
)
def test_a_divided_job_starts_from_another_job(server: EmbeddedServer, tmp_path: Path, level: str) -> None:
    """From a divided one or not, with the optimizer state of that job and, of some parameters, that of a new one."""
    few = ["--store.url", server.url, "--data.limit", "800"]
    first = Resumed(folder=tmp_path / "first", arguments=[*few, *(() if level else ("--dense.shard", "gradients"))])
    run_to_the_end(config_of(first.settings()), 2)
    flags = ["--checkpoint.start_from", str(first.checkpoints), "--checkpoint.start_without", "state.dense.over_arch.*"]

    def started(name: str, *own: str) -> tuple[object, ...]:
        results = run_to_the_end(config_of(Resumed(folder=tmp_path / name, arguments=[*few, *flags]).settings(*own)), 2)
        states = {item.get("state") for item in results[0]["started_from"]["items"] if item["kind"] == "dense"}
        assert states == {"taken", "adagrad: dropped, adagrad: new", None}
        return numbers(results)

    assert started("divided", "--dense.shard", level or "gradients") == started("plain")
