"""Rows that are read a batch late (`pipeline.rows_delay`): the serial reference, caches, ranks, what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.batches import bounds
from bagpipe.pipeline.stage.serial_versions import SerialStage, SerialVersions
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from bagpipe.store.server.embedded import EmbeddedServer
from data.formats import open_source
from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.plain_jobs import all_batches, plain_batch, plain_tables
from tests.system.programs import run_forked
from tests.system.reference import PlainTables
from tests.system.resumed import JOB, Resumed, digests
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from trainer.assembly import build_training_model

#: Ten batches of twelve, and one of five.
_EXAMPLES = 125

_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-6),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-6, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6),
}
#: Settings beside the name and the rate.
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "sgd": {"optim__momentum": 0.9},
    "adamw": {"optim__weight_decay": 0.01},
}


def job(clicks: MakeConfig, schedule: str, stages: int, dense: str = "adagrad", **values: object) -> Config:
    config = change(clicks("sum", "dlrm", "adagrad", limit=_EXAMPLES), run__dtype="float64", optim__dense=dense)
    config = staged(change(config, **_SETTINGS.get(dense, {})), schedule, stages, pipeline__rows_delay=1)
    return change(config, **values)


def reference(config: Config) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, dense parameters, and rows with their state, of plain tables and a plain loop.

    The lookup of batch b reads the tables as they were before the update of batch b - 1.
    """
    built = build_training_model(config, open_source(config.data, config.run.seed).schema)
    assert built.stages is not None, "the job has stages"
    model, batches = built.stages.staged, [plain_batch(batch, built.data) for batch in all_batches(config)]
    tables = PlainTables(plain_tables(built, batches, config.run.dtype), sparse=True)
    embedding = copy.deepcopy(model.embedding)
    embedding.get_submodule("sparse_arch").embedding_bag_collection = tables
    rows = torch.optim.Adagrad(tables.parameters(), lr=config.optim.rows_lr, eps=config.optim.eps)
    for stage in model.stages:
        if not list(stage.module.parameters()):
            stage.module.register_parameter("none", nn.Parameter(torch.zeros(1)))  # optimizers want one
    parameters = {name: p.detach() for name, p in built.converted.model.named_parameters() if "none" not in name}
    (head,) = [number for stage in model.stages for _, number in stage.heads]
    names = [(tuple(map(str, stage.inputs)), tuple(map(str, stage.outputs))) for stage in model.stages]
    serial = SerialVersions(
        [
            SerialStage(module=stage.module, inputs=inputs, outputs=outputs)
            for stage, (inputs, outputs) in zip(model.stages, names, strict=True)
        ],
        lambda number, parameters: _OPTIMIZERS[config.optim.dense](parameters),
        lambda v: (
            nn.functional.binary_cross_entropy_with_logits(v[str(head)].reshape(-1), v["labels"], reduction="sum")
            / v["size"]
        ),
        ASYNCHRONOUS_SCHEDULES[config.pipeline.schedule]
        .loop(model.graph(config.pipeline.microbatches))
        .unroll(len(batches)),
    )
    losses = []
    before = [table.detach().clone() for table in tables.parameters()]
    for batch in batches:
        tables.batch, size = batch, len(batch.labels)
        now = [table.detach().clone() for table in tables.parameters()]
        _set(tables, before)
        looked_up = dict(zip(model.embedding_values, embedding(batch.dense.double(), None), strict=True))
        _set(tables, now)
        units = [
            {
                **{str(n): v[first:end].detach().requires_grad_(v.requires_grad) for n, v in looked_up.items()},
                "labels": batch.labels[first:end].double(),
                "size": torch.tensor(float(size)),
            }
            for first, end in pairwise(bounds(size, config.pipeline.microbatches))
        ]
        trained = serial.train(units)
        losses.append(trained.loss)
        wanted = [n for n, value in looked_up.items() if value.requires_grad]
        rows.zero_grad()
        torch.autograd.backward(
            [looked_up[n] for n in wanted], [torch.cat([unit[str(n)] for unit in trained.gradients]) for n in wanted]
        )
        before = now
        rows.step()
    records = {
        table.name: torch.cat([weight.detach(), rows.state[weight]["sum"]], dim=1)
        for table, weight in zip(tables.tables, tables.parameters(), strict=True)
    }
    return losses, parameters, records


def _set(tables: nn.Module, values: list[Tensor]) -> None:
    for table, value in zip(tables.parameters(), values, strict=True):
        table.data.copy_(value)  # the version that autograd checks stays: gradients of sums need no weights


@pytest.mark.parametrize(
    ("schedule", "stages", "micro", "dense"),
    [
        ("pipedream", 2, 3, "adam"),
        ("pipedream-vertical", 4, 3, "sgd"),
        pytest.param("pipedream-2bw", 4, 8, "adagrad", marks=pytest.mark.slow),
        ("spectrain", 4, 4, "adamw"),
        ("spectrain-v2", 4, 4, "adagrad"),
        ("pipeoptim", 2, 1, "adam"),
        ("pipeoptim", 4, 5, "sgd"),
        ("pipedream", 1, 2, "adam"),
    ],
)
def test_a_job_equals_the_serial_reference(
    clicks: MakeConfig, schedule: str, stages: int, micro: int, dense: str
) -> None:
    config = job(clicks, schedule, stages, dense, pipeline__microbatches=micro)
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        losses, parameters, rows = reference(config)
    assert len(losses) == 11
    end = run_job(change(config, cache__rows=2 * largest_batch(config)))
    np.testing.assert_allclose(end.losses, losses, rtol=0, atol=1e-12)
    for name, value in parameters.items():
        torch.testing.assert_close(end.dense[name], value, rtol=0, atol=1e-12, msg=name)
    for name, value in rows.items():
        np.testing.assert_allclose(end.rows[name][1], value.numpy(), rtol=0, atol=1e-12, err_msg=name)
    direct = run_job(change(config, cache__rows=0, pipeline__recompute=True))
    assert (direct.digests, direct.losses) == (end.digests, end.losses)


@pytest.mark.parametrize(
    ("schema", "model", "ranks", "assign"),
    some_of(
        [("mixed", "deepfm", 2, "contiguous"), ("weighted", "dlrm", 1, "contiguous"), ("sum", "dlrm", 4, "contiguous")],
        {0, 1},
    ),
)
def test_any_cache_and_ranks_give_the_same_job(
    clicks: MakeConfig, schema: str, model: str, ranks: int, assign: str
) -> None:
    config = change(clicks(schema, model, "adam", limit=_EXAMPLES), run__dtype="float64", optim__dense="adam")
    config = staged(config, "pipeoptim", 2, pipeline__rows_delay=1, cacher__assign=assign)
    direct = run_staged(change(config, cache__rows=0), ranks)
    cached = run_staged(change(config, cache__rows=2 * largest_batch(config), oracle__lookahead=3), ranks)
    assert (cached.digests, cached.loss_sum) == (direct.digests, direct.loss_sum)
    if ranks > 1:
        assert_equal_numbers(cached, run_staged(config))


def test_rows_without_a_delay_are_others(clicks: MakeConfig) -> None:
    config = job(clicks, "pipedream", 2)
    assert run_job(config).digests != run_job(change(config, pipeline__rows_delay=0)).digests


def test_the_rows_of_two_batches_must_fit(clicks: MakeConfig) -> None:
    config = job(clicks, "pipedream", 2)
    error = run_job(change(config, cache__rows=largest_batch(config))).trained.input_error
    assert "more of the batch before (pipeline.rows_delay 1) but cache.rows is" in str(error)


def test_what_is_not_possible_with_it(clicks: MakeConfig) -> None:
    config = job(clicks, "pipedream", 4)
    check_config(config)
    for changed, complaint in (
        ({"pipeline__schedule": "1f1b"}, "pipeline.rows_delay 1 needs pipeline.schedule pipedream or .*, got 1f1b"),
        ({"pipeline__microbatches": 2}, "pipeline.rows_delay 1 needs pipeline.microbatches of at least 3, .* got 2"),
        ({"pipeline__rows_delay": 2}, "pipeline.rows_delay must be from 0 to 1, got 2"),
    ):
        with pytest.raises(InputError, match=complaint):
            check_config(change(config, **changed))


def test_statistics_of_batches_are_refused(clicks: MakeConfig) -> None:
    config = change(clicks("mean", "dcnv2-fuxictr", "adagrad"), model__batch_norm=True)
    config = staged(config, "pipedream", 2, pipeline__microbatches=1, pipeline__rows_delay=1)
    with pytest.raises(InputError, match="rows_delay must be 0 for a model that keeps statistics of batches"):
        run_job(config)


@pytest.mark.redis
@pytest.mark.multiproc
def test_between_two_batches_the_model_is_that_of_a_job_that_ended_there(tmp_path: Path) -> None:
    """And evaluations, after which a checkpoint is made, change nothing."""
    flags = ["--pipeline.schedule", "pipeoptim", "--pipeline.stages", "4", "--pipeline.microbatches", "3"]
    job = [*JOB, *flags, "--pipeline.rows_delay", "1", "--cache.rows", "900", "--optim.dense", "adam"]
    results = {}
    for name, more in {
        "plain": [],
        "short": ["--run.steps", "8"],
        "evaluated": ["--eval.every", "4", "--eval.keep_best", "true", "--checkpoint.dir", str(tmp_path / "kept")],
        "patient": ["--eval.every", "4", "--eval.patience", "1", "--eval.min_delta", "0.9"],
        "longer": ["--run.steps", "9"],
    }.items():
        path = tmp_path / f"{name}.json"
        done = run_forked([*job, *more, "--result", str(path)], tmp_path)
        assert done.code == 0, done.err
        results[name] = json.loads(path.read_text())
    evaluations = {found["step"]: found["auc"] for found in results["evaluated"]["evaluations"]}
    assert evaluations[8] == results["short"]["auc"]
    assert digests(tmp_path / "evaluated.json") == digests(tmp_path / "plain.json")
    # Forwards of batch 8 had begun, so it was trained.
    assert (results["patient"]["early_stopped"], results["patient"]["steps"]) == (True, 9)
    assert digests(tmp_path / "patient.json") == digests(tmp_path / "longer.json")


@pytest.mark.redis
@pytest.mark.multiproc
def test_checkpoints_at_rest_take_the_place_of_those_that_lanes_have_begun(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """After an evaluation and at the end, where one is due: lanes have copied the dense part, maybe it is written."""
    flags = ["--pipeline.schedule", "spectrain", "--pipeline.stages", "4", "--pipeline.microbatches", "3"]
    flags += ["--pipeline.rows_delay", "1", "--cache.rows", "900", "--optim.dense", "adam"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *flags])
    ended = job.run("--run.steps", "10", "--eval.every", "5", "--eval.keep_best", "true")
    assert ended.code == 0, ended.err
    resumed = job.run("--run.steps", "15", "--pipeline.recompute", "true")
    assert resumed.code == 0, resumed.err
    assert job.resumed_from() == 10
    expected = tmp_path / "expected.json"
    assert run_forked([*JOB, *flags, "--run.steps", "15", "--result", str(expected)], tmp_path).code == 0
    assert digests(job.result) == digests(expected)


@pytest.mark.redis
@pytest.mark.multiproc
def test_checkpoints_have_the_losses_of_batches_that_could_be_left_out(server: EmbeddedServer, tmp_path: Path) -> None:
    """A checkpoint before a batch comes while the end of the one before is under way."""
    flags = ["--pipeline.schedule", "pipedream", "--pipeline.stages", "2", "--pipeline.microbatches", "2"]
    flags += ["--pipeline.rows_delay", "1", "--cache.rows", "900", "--run.nonfinite", "skip"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *flags])
    assert job.run(dies_at="after-checkpoint-data:2").code != 0
    resumed = job.run()
    assert resumed.code == 0, resumed.err
    assert job.resumed_from() == 5
    expected = tmp_path / "expected.json"
    assert run_forked([*JOB, *flags, "--result", str(expected)], tmp_path).code == 0
    assert digests(job.result) == digests(expected)
