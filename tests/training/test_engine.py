"""Composed training loops: the effect of a bad batch, leaks of a finished run, the start of checkpoints."""

from __future__ import annotations

import gc
import itertools
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from bagpipe.config.sections import CheckpointConfig, Config, StoreConfig
from bagpipe.errors import InputError, JobError
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.ranks import Ranks
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training import reading
from bagpipe.training.engine import Engine
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.part import InFlightBatch
from cacher.planning import PlannedData
from tests.jobs.facts import FACTS, ROWS
from tests.jobs.test_checkpoints import trained
from tests.system.jobs import change
from tests.system.recording import Crash, recorded
from tests.system.staging import staged
from trainer.assembly import build_engine, build_training_model

MakeConfig = Callable[..., Config]

BAD_BATCH = 7


def written_rows(config: Config, num_batches: int, alter: Callable[[Engine], None]) -> set[tuple[int, int, bytes]]:
    """All versions of all rows that a job writes until its data or a bad batch ends it."""
    data = PlannedData(config.data, config.run.seed)
    built = build_training_model(config, data.schema)
    written: set[tuple[int, int, bytes]] = set()
    with MemoryStore(built.rows, num_buckets=8) as store:
        write_many = store.write_many

        def noted(requests: Sequence[WriteRequest]) -> None:
            for request in requests:
                pairs = zip(request.ids.tolist(), request.rows, strict=True)
                written.update((request.table, row_id, row.tobytes()) for row_id, row in pairs)
            write_many(requests)

        store.write_many = noted  # type: ignore[method-assign]
        engine = build_engine(built, store)
        alter(engine)
        with suppress(JobError):
            engine.train(itertools.islice(data.batches("train", built.spec), num_batches))
    return written


def test_a_bad_gradient_of_a_stage_changes_no_row(clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In direct mode every row of a batch is written, but only after the gradients of its stage are checked."""
    config = staged(change(clicks(), cache__rows=0), "1f1b", 2)
    good = written_rows(config, BAD_BATCH, lambda engine: None)
    examine = NonfiniteGuard._examine
    blocked = threading.Event()

    def slow(guard: NonfiniteGuard, point: Point, key: OpKey, b: int) -> None:
        if point is Point.STEP and b == BAD_BATCH and key[0] == 0:
            blocked.wait(0.3)  # gives other lanes time for a wrong write
        examine(guard, point, key, b)

    def alter(engine: Engine) -> None:
        _, parameter = engine.dense.chunks["0"].parameters[0]
        units = engine.dense.pipeline.step.program.micro_per_batch[0]  # type: ignore[attr-defined]
        gradients = itertools.count(1)

        def poison(leaf: object) -> None:
            if next(gradients) > BAD_BATCH * units:
                assert parameter.grad is not None
                parameter.grad.fill_(float("inf"))

        parameter.register_post_accumulate_grad_hook(poison)

    monkeypatch.setattr(NonfiniteGuard, "_examine", slow)
    assert not written_rows(config, 26, alter) - good


@pytest.mark.parametrize("order", ["0,1,2,3", "1,0,3,2"])
def test_a_checkpoint_begins_with_the_first_forward_of_a_table(clicks: MakeConfig, tmp_path: Path, order: str) -> None:
    """Any micro-batch can run first."""
    units = order.split(",")
    rows = [
        ",".join([*(f"0F{m}" for m in units), "", "", *(f"0B{m}" for m in units)]),
        ",".join(["", *(f"1F{m}" for m in units), *(f"1B{m}" for m in units)]),
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(rows) + "\n")
    stages = {"pipeline__schedule": str(table), "pipeline__stages": 2, "pipeline__microbatches": 4}
    config = change(clicks(), **stages)
    whole = recorded(config, tmp_path, every=3).run()
    job = recorded(config, tmp_path, every=3)
    with pytest.raises(Crash):
        job.run(crash_at=14)
    again = job.run()
    assert again.digests == whole.digests
    assert again.totals == whole.totals


@pytest.mark.parametrize("world_size", [1, 2])
def test_averages_with_a_parameter_that_no_stage_uses(clicks: MakeConfig, tmp_path: Path, world_size: int) -> None:
    stages = {"pipeline__schedule": "1f1b", "pipeline__stages": 2, "pipeline__microbatches": 4}
    factory = "tests.system.staged_models:spare"
    config = change(clicks(), model__factory=factory, optim__ema_decay=0.9, **stages)
    job = recorded(config, tmp_path, every=3, world_size=world_size)
    job.change_batches = lambda rank, batches: itertools.islice(batches, 8)
    job.run()
    job.change_batches = lambda rank, batches: batches
    assert job.run().first_batch == 8


class Tracked(InFlightBatch):
    """A batch with weak reference support."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("schedule", ["none", "1f1b"])
def test_a_run_that_is_over_keeps_no_batch_alive(
    clicks: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    batches: list[weakref.ref[Tracked] | weakref.ref[Tensor]] = []

    def make(**fields: object) -> Tracked:
        batch = Tracked(**fields)  # type: ignore[arg-type]
        assert batch.inputs is not None
        batches.extend((weakref.ref(batch), weakref.ref(batch.inputs.dense)))
        return batch

    monkeypatch.setattr(reading, "InFlightBatch", make)
    engines: list[Engine] = []
    config = change(clicks(), pipeline__schedule=schedule, pipeline__stages=2 if schedule != "none" else 1)
    recorded(config, tmp_path, every=3, prepare=engines.append).run()
    gc.collect()
    assert batches
    assert not [batch for batch in batches if batch() is not None]
    assert engines


def test_a_checkpoint_that_cannot_be_loaded_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    def refuse(checkpoints: Checkpoints) -> None:
        raise InputError("another model")

    monkeypatch.setattr(Checkpoints, "_restore", refuse)
    with MemoryStore(ROWS, name=uuid.uuid4().hex) as store:
        checkpoints = Checkpoints(CheckpointConfig(), StoreConfig(), Ranks(), FACTS, store, **trained())
        with pytest.raises(InputError, match="another model"), checkpoints:
            pass
