"""Autocast, loss scaling, CUDA graph capture and compilation in whole jobs keep direct mode's bits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
from bagpipe.dense.chunks import chunked_model
from bagpipe.errors import JobError
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.repeated_calls import RepeatedCalls
from tests.dense.chunks.poison import PoisonedArena
from tests.system import programs
from tests.system.jobs import change, run_job
from tests.system.programs import run_forked
from tests.system.rank_threads import run_ranks
from tests.system.recording import Crash, recorded
from tests.system.resumed import JOB, digests

MakeConfig = Callable[..., Config]

STAGES = {"pipeline__schedule": "zb-h1", "pipeline__stages": 2, "pipeline__microbatches": 4}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.cuda_graph` with a CPU fake of CUDA graphs."""
    monkeypatch.setattr("trainer.dense.open_graphs", lambda device: RepeatedCalls())


def smallest(config: Config) -> Config:
    """The smallest cache: rows leave it all the time."""
    return change(config, cache__rows=90)


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("autocast", "stages"), [("float16", {}), ("bfloat16", STAGES)], ids=["whole", "staged"])
def test_autocast_keeps_direct_modes_bits(clicks: MakeConfig, autocast: str, stages: dict[str, object]) -> None:
    plain = change(clicks(), **stages)
    config = change(plain, run__autocast=autocast)
    direct, cached = run_job(change(config, cache__rows=0)), run_job(smallest(config))
    assert cached.digests == direct.digests
    full = run_job(plain)
    assert full.digests != direct.digests
    assert direct.losses == pytest.approx(full.losses, rel=2e-2)
    for tensors in (cached.dense, *cached.state.values()):
        assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert {records.dtype.str for _, records in cached.rows.values()} == {"<f4"}


def test_one_micro_batch_through_stages_is_the_whole_model_under_autocast(clicks: MakeConfig) -> None:
    config = change(clicks("ragged", "wide-deep"), run__autocast="bfloat16")
    staged = change(config, pipeline__schedule="1f1b", pipeline__stages=2)
    assert run_job(staged).digests == run_job(config).digests


def test_ranks_under_autocast_keep_direct_modes_bits(clicks: MakeConfig) -> None:
    config = change(clicks(), run__autocast="float16")
    direct, cached = run_ranks(change(config, cache__rows=0), 2), run_ranks(smallest(config), 2)
    assert (cached.dense_digest, cached.embedding_digest) == (direct.dense_digest, direct.embedding_digest)


def test_held_out_examples_are_scored_in_full_precision(clicks: MakeConfig) -> None:
    """bfloat16 jobs are scored in full precision; 7-bit mantissas would make many scores equal."""
    config = change(clicks(eval_fraction=0.3), run__autocast="bfloat16")
    ranks = run_ranks(config, 2)
    logits = torch.tensor([*ranks.scores[0], *ranks.scores[1]])
    assert not torch.equal(logits, logits.bfloat16().float())


# ---- loss scale ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [{}, STAGES], ids=["whole", "staged"])
def test_a_loss_scale_changes_no_bit(clicks: MakeConfig, stages: dict[str, object]) -> None:
    config = change(clicks("weighted"), **stages)
    assert run_job(change(config, run__loss_scale=1024)).digests == run_job(config).digests


def test_a_loss_scale_changes_no_bit_on_ranks(clicks: MakeConfig) -> None:
    plain, scaled = (run_ranks(change(clicks(), run__loss_scale=scale), 2) for scale in (1, 1024))
    assert (plain.dense_digest, plain.embedding_digest) == (scaled.dense_digest, scaled.embedding_digest)


@pytest.mark.parametrize("stages", [{}, STAGES], ids=["whole", "staged"])
def test_an_error_names_a_loss_scale_that_is_too_large(clicks: MakeConfig, stages: dict[str, object]) -> None:
    config = change(clicks(), run__autocast="float16", run__loss_scale=2**24, **stages)
    with pytest.raises(JobError, match=r"^batch 0: .*not finite.*run\.loss_scale = 16777216: a smaller one may do"):
        run_job(config)


# ---- a loss scale that grows -----------------------------------------------------------------------------------------

#: The initial scale overflows float16, so batches are skipped until one fits.
GROWING = {
    "run__autocast": "float16",
    "run__nonfinite": "skip",
    "run__loss_scale": 2**24,
    "run__loss_scale_growth_interval": 12,
}


@pytest.mark.usefixtures("replays")
def test_a_growing_loss_scale_changes_no_bit(clicks: MakeConfig) -> None:
    """Covers captured graphs, which take the scale as an input, and the smaller last batch."""
    config = change(clicks("mixed", "deepfm"), run__nonfinite="skip")
    grown = run_job(change(config, run__loss_scale_growth_interval=3, run__cuda_graph=True))
    assert grown.trained.progress.loss_scale == 2 ** (26 // 3)
    assert grown.digests == run_job(config).digests


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (1, {}),
        (2, {}),
        (1, STAGES),
        (2, STAGES),
        (2, {"pipeline__schedule": "pipedream-2bw", "pipeline__stages": 2, "pipeline__microbatches": 2}),
    ],
)
def test_a_resumed_job_continues_the_loss_scale(
    clicks: MakeConfig, tmp_path: Path, ranks: int, stages: dict[str, object]
) -> None:
    """A job resumes among skipped batches and among finite ones, with any cache size."""
    config = change(clicks(), **GROWING, **stages)
    job = recorded(smallest(change(config, data__limit=12 * 18)), tmp_path, every=2, world_size=ranks)
    with pytest.raises(Crash):
        job.run(crash_at=6)
    job.run()
    job.config = smallest(config)
    resumed = job.run()
    assert resumed.first_batch == 18
    direct = recorded(change(config, cache__rows=0), tmp_path, every=0, world_size=ranks).run()
    assert resumed.digests == direct.digests
    progress = [result.progress for end in (resumed, direct) for result in end.results]
    ends = {(each.loss_scale, each.skipped_batches) for each in progress}
    assert len(ends) == 1
    assert max(ends)[1] > 5


# ---- recordings ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_captured_graphs_keep_the_eager_bits(clicks: MakeConfig, autocast: str) -> None:
    config = change(clicks("mixed", "deepfm"), run__autocast=autocast)
    recorded = change(config, run__cuda_graph=True)
    eager = run_job(config)
    assert run_job(smallest(recorded)).digests == run_job(change(recorded, cache__rows=0)).digests == eager.digests


@pytest.mark.usefixtures("replays")
def test_captured_graphs_of_ranks_keep_the_eager_bits(clicks: MakeConfig) -> None:
    """Row gradients travel while the next batch is replayed."""
    eager, recorded = (run_ranks(change(smallest(clicks()), run__cuda_graph=on), 2) for on in (False, True))
    assert (eager.dense_digest, eager.embedding_digest) == (recorded.dense_digest, recorded.embedding_digest)


# ---- resuming, compiling ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize(
    "asked",
    [
        {"run__autocast": "float16"},
        {"run__autocast": "bfloat16", "run__cuda_graph": True},
        {"run__compile": True, "dense__state": "host"},
    ],
    ids=["eager", "replayed", "traced-in-chunks"],
)
def test_a_resumed_job_ends_with_the_same_bits(
    clicks: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    config = smallest(change(clicks("sum", "wide-deep"), **asked))
    job = recorded(change(config, data__limit=12 * 10), tmp_path)
    job.run()
    job.config = config
    end = job.run()
    assert end.first_batch == 10
    assert end.digests == recorded(config, tmp_path, every=0).run().digests


def test_traced_code_keeps_the_bits(clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing as for inductor, executed by torch's own operators, keeps the model's semantics."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    config = change(clicks(), **STAGES)
    traced = run_job(smallest(change(config, run__compile=True)))
    plain = run_job(config)
    assert traced.digests == plain.digests
    assert [*traced.dense] == [*plain.dense]


@pytest.mark.parametrize("stages", [{}, STAGES], ids=["whole", "staged"])
def test_traced_code_in_chunks_keeps_the_bits(
    clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, stages: dict[str, object]
) -> None:
    """A stage needs all its weights at once; state streams through the device."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(chunked_model, "Arena", PoisonedArena)
    config = change(clicks(eval_fraction=0.3), **stages, optim__dense="adam")
    traced = run_job(change(config, run__compile=True, dense__state="host"))
    plain = run_job(config)
    assert (traced.digests, traced.auc) == (plain.digests, plain.auc)


# torch's inductor imports functions that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_compiled_code_keeps_direct_modes_bits(clicks: MakeConfig, autocast: str) -> None:
    plain = change(clicks(eval_fraction=0.3), run__autocast=autocast)
    config = change(plain, run__compile=True)
    direct, cached = run_job(change(config, cache__rows=0)), run_job(smallest(config))
    assert cached.digests == direct.digests
    assert cached.losses == pytest.approx(run_job(plain).losses, rel=1e-4 if autocast == "off" else 2e-2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [{}, STAGES], ids=["whole", "staged"])
def test_compiled_code_in_chunks_keeps_the_bits(
    clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, stages: dict[str, object]
) -> None:
    monkeypatch.setattr(chunked_model, "Arena", PoisonedArena)
    config = change(clicks(), run__compile=True, optim__dense="adam", **stages)
    if stages:
        config = change(config, pipeline__schedule="1f1b")
    assert run_job(change(config, dense__state="host")).digests == run_job(config).digests


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_code_that_runs_twice_keeps_the_bits(clicks: MakeConfig) -> None:
    config = change(clicks(), run__compile=True, **STAGES)
    half = change(config, pipeline__recompute=True, pipeline__recompute_share="0.5")
    assert run_job(half).digests == run_job(config).digests


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        ("zb-h1", "aot_eager"),
        pytest.param("zb-h1", "inductor", marks=pytest.mark.slow),
        pytest.param("gpipe", "inductor", marks=pytest.mark.slow),
    ],
)
def test_activations_of_compiled_stages_go_to_the_host(
    clicks: MakeConfig, schedule: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    config = change(clicks(limit=150), run__compile=True, **{**STAGES, "pipeline__schedule": schedule})
    host = change(config, pipeline__activations="host", cache__rows=200)
    assert run_job(host).digests == run_job(config).digests


def ends_alike(folder: Path, server: EmbeddedServer, arguments: list[str]) -> bool:
    """A job stopped after 13 batches and resumed ends like an uninterrupted one; each start compiles on its own."""
    found = []
    for name in ("at-once", "resumed"):
        (folder / name).mkdir()
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / name / "code")}
        job = ["--checkpoint.dir", str(folder / name / "checkpoints"), "--store.url", server.url, *arguments]
        job = [*JOB, *job, "--store.namespace", uuid.uuid4().hex, "--result", str(folder / name / "result.json")]
        if name == "resumed":
            assert run_forked([*job, "--run.steps", "13"], folder, own).code == 0
        assert run_forked(job, folder, own).code == 0
        found.append(folder / name / "result.json")
    assert json.loads(found[1].read_text())["resumed_from"] == 13
    return digests(found[0]) == digests(found[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.redis
@pytest.mark.multiproc
def test_a_resumed_compiled_job_ends_with_the_same_bits(
    tmp_path: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "TIMEOUT_S", 300.0)  # inductor's first compilation takes a minute on a busy machine
    assert ends_alike(tmp_path, server, ["--run.compile", "true"])
