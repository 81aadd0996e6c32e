"""Batches with non-finite loss or gradients end the job or are skipped, and never change a row.

Updates that make rows or dense parameters non-finite end the job before either is saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.config.sections import Config
from bagpipe.errors import JobError
from bagpipe.kernels.interface import map_steps
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline import devices
from bagpipe.pipeline.stream import NullStreams
from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine
from bagpipe.training.nonfinite import _TOTALS, NonfiniteGuard
from cacher.planning import PlannedData
from tests.effort import some_of
from tests.system.jobs import change
from tests.system.lagging import LaggingStreams
from tests.system.rank_threads import run_ranks
from tests.system.recording import Recorded, recorded
from tests.system.staging import staged
from tests.training.small import guard_of
from trainer.assembly import build_engine, build_training_model

MakeConfig = Callable[..., Config]

BAD = 7

KFAC: Mapping[str, object] = {"optim__precondition": "kfac", "optim__kfac_damping": 0.1}

#: How a job trains its dense part -> changes of its configuration.
WAYS: Mapping[str, Callable[[Config], Config]] = {
    "whole": lambda config: config,
    **{
        schedule: partial(staged, schedule=schedule, num_ranks=2, pipeline__microbatches=2)
        for schedule in ("1f1b", "zb-v", "chimera", "pipedream")
    },
    "rows-delay": partial(staged, schedule="pipedream", num_ranks=2, pipeline__microbatches=2, pipeline__rows_delay=1),
    "chunked": lambda config: change(config, dense__budget_bytes=4096),
    "k-fac": lambda config: change(config, optim__precondition="kfac"),
}


def with_bad_batch(batches: Iterator[RankBatch], value: float, at: int = BAD) -> Iterator[RankBatch]:
    """The batches, with a non-finite dense column in one example of batch `at`."""
    for rank_batch in batches:
        if rank_batch.batch.index == at and rank_batch.batch.num_examples:
            dense = rank_batch.batch.dense.copy()
            dense[-1, 0] = value
            yield dataclasses.replace(rank_batch, batch=dataclasses.replace(rank_batch.batch, dense=dense))
        else:
            yield rank_batch


class Small:
    """A job on one rank, with access to its parts."""

    def __init__(self, config: Config) -> None:
        self.data = PlannedData(config.data, config.run.seed)
        self.built = build_training_model(config, self.data.schema)
        self.store = MemoryStore(self.built.rows, num_buckets=8)
        self.engine: Engine = build_engine(self.built, self.store)

    def batches(self) -> Iterator[RankBatch]:
        return self.data.batches("train", self.built.spec)

    def digests(self) -> tuple[str, str]:
        return dense_digest(self.engine.dense.model, self.engine.dense.optimizer), embedding_digest(self.store)

    def is_finite(self) -> bool:
        rows = [self.store.read(table, self.store.ids(table)).rows for table in range(len(self.built.rows.tables))]
        dense = [parameter.detach().numpy() for parameter in self.engine.dense.model.parameters()]
        return all(bool(np.isfinite(values).all()) for values in (*rows, *dense))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [0, 80, 10_000])
def test_a_bad_batch_ends_the_job(clicks: MakeConfig, value: float, rows: int) -> None:
    job = Small(change(clicks(), cache__rows=rows))
    with job.store:
        with pytest.raises(JobError, match=rf"batch {BAD}: the loss is not finite.*run.nonfinite"):
            job.engine.train(with_bad_batch(job.batches(), value))
        assert job.is_finite()


#: Ways in which every batch begins with the weights of the batch before.
SYNCHRONOUS: Mapping[str, Callable[[Config], Config]] = {
    **{way: WAYS[way] for way in ("1f1b", "zb-v", "chimera")},
    "whole, running means": lambda config: change(config, model__factory="tests.system.staged_models:normalising"),
    "1f1b, running means": lambda config: staged(
        change(config, model__factory="tests.system.staged_models:normalising"), "1f1b", 2, pipeline__microbatches=1
    ),
    "1f1b, chunks": lambda config: change(WAYS["1f1b"](config), dense__state="host", optim__momentum=0.9),
    "micro-batches": lambda config: change(config, pipeline__microbatches=3, optim__clip_norm=0.1),
    "recomputed": lambda config: change(WAYS["1f1b"](config), pipeline__recompute=True),
}


@pytest.mark.parametrize(
    ("way", "rows"), some_of([*itertools.product(SYNCHRONOUS, [0, 80, 10_000])], {0, 4, 8, 9, 10, 11, 13, 17, 19, 23})
)
def test_a_skipped_batch_leaves_no_trace(clicks: MakeConfig, way: str, rows: int) -> None:
    """A skipped batch leaves no trace, running means included, with optimizers that do not count steps."""
    config = SYNCHRONOUS[way](change(clicks(), cache__rows=rows, optim__dense="sgd"))
    config = change(config, run__nonfinite="skip")
    job = Small(config)
    with job.store:
        result = job.engine.train(with_bad_batch(job.batches(), float("nan")))
        assert (result.progress.steps, result.progress.skipped_batches) == (26, 1)
        assert job.is_finite()
        assert np.isfinite(float(result.progress.loss_sum))
        found = job.digests(), float(result.progress.loss_sum), result.progress.samples
    other = Small(config)
    batches = [rank_batch.batch for rank_batch in other.batches() if rank_batch.batch.index != BAD]
    batches = [dataclasses.replace(batch, index=index) for index, batch in enumerate(batches)]
    with other.store:
        without = other.engine.train(plan_rank_batches(batches, other.built.spec))
        assert found[1:] == (float(without.progress.loss_sum), without.progress.samples)
        # Rows that occur only in the bad batch are in neither store: they were never updated.
        assert found[0] == other.digests()


@pytest.mark.parametrize("rows", [0, 100])
def test_all_ranks_skip_the_same_batches(clicks: MakeConfig, rows: int) -> None:
    """If one rank finds a bad batch, all ranks skip it, for any cache size."""
    config = change(clicks(), cache__rows=rows, run__nonfinite="skip")
    ends = [
        run_ranks(change(config, cache__rows=rows), 3, change_batches=bad_on_rank_1) for rows in (0, rows or 10_000)
    ]
    assert ends[0].digests == ends[1].digests
    for end in ends:
        assert [result.progress.skipped_batches for result in end.results] == [1, 1, 1]
        assert sum(result.progress.samples for result in end.results) == 305 - 12
        assert all(bool(np.isfinite(rows).all()) for _, rows in end.rows.values())


#: Schedules of stages, ranks, and changes.
ON_RANKS: Mapping[str, tuple[str, int, dict[str, object]]] = {
    "two processes": ("1f1b", 2, {}),
    "two pipes": ("chimera", 2, {}),
    "two replicas": ("zb-h1", 4, {}),
    "unlike replicas": ("1f1b", 3, {"pipeline__replicas": "2,1"}),
    "shares of gradients": ("1f1b", 4, {"dense__shard": "gradients"}),
    "shares of parameters": ("1f1b", 4, {"dense__shard": "parameters", "optim__clip_norm": 0.1}),
    "versions": ("pipedream-2bw", 2, {}),
    "predictions, rows a batch late": ("spectrain", 2, {"pipeline__rows_delay": 1}),
    "parts of backwards": ("1f1b", 2, {"pipeline__backward_shares": "0.5,1"}),
    "preconditioned": ("chimera", 2, {**KFAC, "optim__kfac_inverse_every": 2}),
    "preconditioned a batch late": ("1f1b", 4, {**KFAC, "optim__kfac_lag": 1, "dense__shard": "gradients"}),
}


@pytest.mark.parametrize("way", some_of([*ON_RANKS], set(range(11))))
def test_all_stages_skip_the_same_batches(clicks: MakeConfig, way: str) -> None:
    schedule, world_size, keys = ON_RANKS[way]
    config = staged(clicks(), schedule, 2, pipeline__microbatches=2, run__nonfinite="skip", optim__dense="adam", **keys)
    rank = max(rank for rank, share in enumerate(example_shares(config, world_size)) if share)

    def bad(this: int, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
        return with_bad_batch(batches, float("nan")) if this == rank else batches

    ends = [run_ranks(change(config, cache__rows=rows), world_size, change_batches=bad) for rows in (0, 200)]
    assert ends[0].digests == ends[1].digests
    for end in ends:
        assert [result.progress.skipped_batches for result in end.results] == [1] * world_size
        assert sum(result.progress.samples for result in end.results) == 305 - 12
        assert all(np.isfinite(float(result.progress.loss_sum)) for result in end.results)
        assert all(bool(np.isfinite(rows).all()) for _, rows in end.rows.values())


@pytest.mark.parametrize(("first", "every"), [(5, 1), (0, 3), (3, 2)])
def test_a_skipped_batch_is_in_no_factor_of_stages(clicks: MakeConfig, first: int, every: int) -> None:
    """As in the whole model, where the batch is known to be bad before its inversions."""
    values = {**KFAC, "optim__kfac_inverse_every": every, "run__dtype": "float64", "run__nonfinite": "skip"}
    config = change(clicks("sum", "dlrm", "adagrad", limit=125), **values)
    whole = Small(config)
    with whole.store:
        whole.engine.train(bad_from(first, 0, whole.batches()))
    cut = run_ranks(staged(config, "1f1b", 2, pipeline__microbatches=1), 2, change_batches=partial(bad_from, first))
    for name, value in whole.engine.dense.model.state_dict().items():
        torch.testing.assert_close(cut.dense[name], value, rtol=0, atol=1e-12)


def bad_from(first: int, rank: int, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
    """Two bad batches."""
    for bad in (first, first + 1):
        batches = with_bad_batch(batches, float("nan"), bad)
    return batches


def example_shares(config: Config, world_size: int) -> tuple[int, ...]:
    """By rank, its share of the examples."""
    built = build_training_model(config, PlannedData(config.data, config.run.seed).schema, world_size)
    return built.spec.example_shares or (1,) * world_size


def bad_on_rank_1(rank: int, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
    return with_bad_batch(batches, float("nan")) if rank == 1 else batches


def test_the_error_names_the_rank(clicks: MakeConfig) -> None:
    with pytest.raises(JobError, match=rf"batch {BAD} of rank 1: the loss is not finite"):
        run_ranks(change(clicks(), cache__rows=100), 2, change_batches=bad_on_rank_1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_stop(clicks: MakeConfig, schedule: str) -> None:
    job = Small(staged(change(clicks(), cache__rows=200), schedule, 2))
    with job.store:
        with pytest.raises(JobError, match=rf"batch {BAD}: .* is not finite"):
            job.engine.train(with_bad_batch(job.batches(), float("nan")))
        assert job.is_finite()


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_loss_with_finite_gradients_ends_the_job(clicks: MakeConfig, way: str) -> None:
    config = change(clicks(limit=24), cache__rows=200, model__loss="weighted_bce", model__pos_weight=3.3e38)
    job = Small(WAYS[way](config))
    with job.store:
        with pytest.raises(JobError, match="batch 0: the loss is not finite"):
            job.engine.train(job.batches())
        assert job.is_finite()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [0, 200])
def test_rows_that_an_update_made_infinite_are_not_stored(clicks: MakeConfig, way: str, rows: int) -> None:
    """The last batch: no later loss tells."""
    config = change(clicks(optimizer="sgd", limit=12), cache__rows=rows, cache__dtype="float16", optim__rows_lr=1e9)
    job = Small(WAYS[way](config))
    with job.store:
        with pytest.raises(JobError, match=r"table \w+ id -?\d+: an update made .* not finite in float16"):
            job.engine.train(job.batches())
        assert job.is_finite()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "k-fac"])  # which limits its steps
def test_dense_parameters_that_a_step_made_infinite_end_the_job(clicks: MakeConfig, way: str) -> None:
    config = change(clicks(limit=12), model__loss="weighted_bce", model__pos_weight=1e8, optim__rows_lr=1e-9)
    config = change(config, optim__dense="sgd", optim__dense_lr=3e37)
    job = Small(WAYS[way](config))
    with job.store, pytest.raises(JobError, match=r"a step of the dense optimizer made [\w.]+ not finite"):
        job.engine.train(job.batches())


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("rows", [0, 10_000])
def test_the_checkpoint_before_an_infinite_row_is_the_last(
    clicks: MakeConfig, tmp_path: Path, nonfinite: str, rows: int
) -> None:
    config = change(clicks(optimizer="sgd"), cache__rows=rows, cache__dtype="float16", run__nonfinite=nonfinite)
    job = recorded(config, tmp_path, every=2, by_hand=(BAD - 1,))

    def prepare(engine: Engine) -> None:
        before = engine.row_steps
        engine.row_steps = lambda b: map_steps(
            before(b), lambda step: dataclasses.replace(step, lr=1e9 if b == BAD else step.lr)
        )

    job.prepare = prepare
    with pytest.raises(JobError, match="not finite"):
        job.run()
    job.prepare = lambda engine: None
    end = job.run()
    assert end.first_batch == BAD - 1
    assert end.digests == recorded(config, tmp_path).run().digests


def test_a_checkpoint_with_an_infinite_dense_parameter_is_not_made(clicks: MakeConfig, tmp_path: Path) -> None:
    """A parameter that no loss depends on."""
    job = recorded(clicks(), tmp_path, every=2, by_hand=(BAD - 1,))

    def prepare(engine: Engine) -> None:
        first, steps = next(iter(engine.dense.parameters.values())), itertools.count()

        def after_step(*_: object) -> None:
            if next(steps) == BAD:
                first.data.view(-1)[0] = float("inf")

        engine.dense.optimizer.register_step_post_hook(after_step)

    job.prepare = prepare
    with pytest.raises(JobError, match="not finite"):
        job.run()
    job.prepare = lambda engine: None
    assert job.run().first_batch == BAD - 1


def test_rows_not_updated_are_not_lost(clicks: MakeConfig, tmp_path: Path) -> None:
    """Rows of a skipped batch were planned but are not in the store; they do not count as lost."""
    config = change(clicks(), cache__rows=0, run__nonfinite="skip")
    name = uuid.uuid4().hex
    job = Recorded(
        config=config,
        root=tmp_path,
        name=name,
        every=3,
        change_batches=lambda rank, batches: with_bad_batch(batches, np.inf, at=0),
    )
    end = job.run()
    assert end.results[0].progress.skipped_batches == 1
    again = job.run()
    assert again.results[0].progress.skipped_batches == 1, "the count goes on"


def test_an_overflowing_sum_of_finite_gradients_is_good() -> None:
    """Only non-finite terms are bad: a sum of finite terms can overflow."""
    guard = guard_of(NullStreams())
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3e38)
    assert not guard.is_bad(0, gradients=[("weight", parameter.grad)])
    parameter.grad[1] = float("-inf")
    with pytest.raises(JobError, match="batch 3: the gradient of weight is not finite"):
        guard.is_bad(3, gradients=[("weight", parameter.grad)])


@pytest.mark.parametrize("total", _TOTALS.values(), ids=_TOTALS)
def test_a_total_is_finite_if_and_only_if_all_terms_are(total: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    terms = [torch.randn(3, 5), torch.tensor(2.0, dtype=torch.float64), torch.full((1,), 3e38), torch.randn(7).half()]
    assert bool(total(terms).isfinite())
    for tensor in (terms[0][1], terms[1], terms[2]):
        for value in (float("nan"), float("inf"), float("-inf")):
            before = tensor.clone()
            tensor.fill_(value)
            assert not bool(total(terms).isfinite())
            tensor.copy_(before)


def test_empty_groups_are_good() -> None:
    groups: tuple[ActiveTableGroup, ...] = ()
    guard = guard_of(NullStreams(), rank=2, skips_nonfinite=True)
    assert not guard.is_bad(0, groups=groups)
    assert not guard.is_bad(0, arrived=[torch.empty(0, 4)])


def test_the_receiver_checks_gradients_of_rows(clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver checks gradients too: on a device, the sender does not know yet that they are bad. Here it never
    does.
    """
    is_bad, write = NonfiniteGuard.is_bad, MemoryStore.write_many
    monkeypatch.setitem(devices.STREAMS, "cpu", lambda device: LaggingStreams())
    monkeypatch.setattr(
        NonfiniteGuard, "is_bad", lambda guard, batch, arrived=(), **_: is_bad(guard, batch, arrived=arrived) and False
    )
    written: list[bool] = []

    def noted(store: MemoryStore, requests: Sequence[WriteRequest]) -> None:
        written.extend(bool(np.isfinite(request.rows).all()) for request in requests)
        write(store, requests)

    monkeypatch.setattr(MemoryStore, "write_many", noted)
    with pytest.raises(
        JobError, match=rf"batch {BAD} of rank [01]: a gradient of rows that a rank has sent is not fin"
    ):
        run_ranks(change(clicks(), cache__rows=0), 2, change_batches=bad_on_rank_1)
    assert written
    assert all(written)
