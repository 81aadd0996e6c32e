"""The moving average of dense weights follows torch's rule over resumes, ranks and stages, and evaluation uses it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.engine import Engine
from bagpipe.training.weight_average import WeightAverage
from cacher.planning import PlannedData
from tests.effort import some_of
from tests.system.jobs import change
from tests.system.recording import recorded
from tests.training.small import small_dense
from trainer.assembly import build_dense, build_engine, build_parts, build_training_model

MakeConfig = Callable[..., Config]


def averages_of(engine: Engine) -> dict[str, torch.Tensor]:
    (average,) = engine.parts
    assert isinstance(average, WeightAverage)
    return {name: value.clone() for name, value in average.averages.items()}


def test_averages_follow_torchs_rule_and_evaluation_uses_them(clicks: MakeConfig) -> None:
    config = change(clicks(eval_fraction=0.2), optim__ema_decay=0.9, optim__ema_evaluate=True)
    data = PlannedData(config.data, config.run.seed)
    built = build_training_model(config, data.schema)
    dense = build_dense(built)
    (average,) = parts = build_parts(built, dense)
    assert isinstance(average, WeightAverage)
    theirs = AveragedModel(dense.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.n_averaged += 1  # torch's first update copies the weights; ours starts from the initial weights
    with MemoryStore(built.rows) as store:
        engine = build_engine(built, store, dense=dense, parts=parts)
        engine.train(data.batches("train", built.spec), on_batch=lambda totals: theirs.update_parameters(dense.model))
        expected = {name.removeprefix("module."): value for name, value in theirs.named_parameters()}
        assert average.averages.keys() == expected.keys()
        for name, value in average.averages.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
        weights = {name: value.clone() for name, value in dense.model.named_parameters()}
        scores: list[torch.Tensor] = []
        engine.evaluate(data.batches("eval", built.eval_spec), lambda logits, _: scores.append(logits))
        assert all(torch.equal(value, weights[name]) for name, value in dense.model.named_parameters())
        plain: list[torch.Tensor] = []
        other = build_engine(built, store, cache=engine.cache, dense=dense, parts=())
        other.evaluate(data.batches("eval", built.eval_spec), lambda logits, _: plain.append(logits))
        with average.swapped_in():
            averaged: list[torch.Tensor] = []
            other.evaluate(data.batches("eval", built.eval_spec), lambda logits, _: averaged.append(logits))
    assert torch.equal(torch.cat(scores), torch.cat(averaged))
    assert not torch.equal(torch.cat(scores), torch.cat(plain))


@pytest.mark.parametrize(("stages", "world_size"), some_of([(False, 1), (False, 2), (True, 1), (True, 2)], {1, 2}))
def test_a_resumed_job_continues_its_averages(
    clicks: MakeConfig, tmp_path: Path, world_size: int, stages: bool
) -> None:
    """Under a byte budget of the dense part before it is resumed, and without one."""
    values = {"pipeline__schedule": "1f1b", "pipeline__stages": 2, "pipeline__microbatches": 4} if stages else {}
    config = change(clicks(limit=14 * 12), optim__ema_decay=0.9, **values)
    engines: list[Engine] = []
    whole = recorded(config, tmp_path, every=3, world_size=world_size, prepare=engines.append)
    end = whole.run()
    expected = [averages_of(engine) for engine in engines]
    engines.clear()
    budgeted = change(config, dense__budget_bytes=60_000)
    job = recorded(budgeted, tmp_path, every=3, world_size=world_size, prepare=engines.append)
    # Ended, not killed: the last checkpoint is complete, however slow the publisher.
    job.change_batches = lambda rank, batches: itertools.islice(batches, 8)
    job.run()
    job.change_batches = lambda rank, batches: batches
    job.config = config
    engines.clear()
    again = job.run()
    assert again.first_batch == 8
    assert again.digests == end.digests
    for engine, averages in zip(engines, expected, strict=True):
        held = {name for chunk in engine.dense.chunks.values() for name, _ in chunk.parameters}
        found = averages_of(engine)
        assert held
        assert all(torch.equal(found[name], averages[name]) for name in held)
        assert any(not torch.equal(found[name], dict(engine.dense.model.named_parameters())[name]) for name in held)


@pytest.mark.parametrize(("level", "other"), [("gradients", "parameters"), ("parameters", "optimizer")])
def test_averages_of_divided_stages(clicks: MakeConfig, tmp_path: Path, level: str, other: str) -> None:
    """Segments of those of whole ones, resumed on another level, and from there undivided."""
    config = change(
        clicks(limit=14 * 12),
        optim__ema_decay=0.9,
        optim__dense="adam",
        pipeline__schedule="1f1b",
        pipeline__stages=2,
        pipeline__microbatches=4,
    )
    engines: list[Engine] = []
    end = recorded(config, tmp_path / "whole", every=3, world_size=4, prepare=engines.append).run()
    expected = [averages_of(engine) for engine in engines]
    divided = change(config, dense__shard=level)
    job = recorded(divided, tmp_path / "divided", every=3, world_size=4, prepare=engines.append)
    job.change_batches = lambda rank, batches: itertools.islice(batches, 4)
    for next_level in (other, "none"):
        job.run()
        job.config = change(config, dense__shard=next_level)
    job.change_batches = lambda rank, batches: batches
    engines.clear()
    assert job.run().digests == end.digests
    for engine, averages in zip(engines, expected, strict=True):
        held = {name for chunk in engine.dense.chunks.values() for name, _ in chunk.parameters}
        assert held
        assert all(torch.equal(averages_of(engine)[name], averages[name]) for name in held)


def test_each_rank_averages_its_segments(clicks: MakeConfig, tmp_path: Path) -> None:
    config = change(
        clicks(limit=7 * 12),
        optim__ema_decay=0.9,
        pipeline__schedule="breadth-first",
        pipeline__stages=2,
        pipeline__chunks=2,
        pipeline__microbatches=2,
    )
    engines: list[Engine] = []
    recorded(config, tmp_path / "whole", every=3, world_size=2, prepare=engines.append).run()
    expected = averages_of(engines[0])
    engines.clear()
    divided = change(config, dense__shard="parameters")
    recorded(divided, tmp_path / "divided", every=3, world_size=2, prepare=engines.append).run()
    parts: dict[str, list[torch.Tensor]] = {}
    for engine in engines:
        for name, average in averages_of(engine).items():
            parts.setdefault(name, []).append(average)
    assert parts.keys() == expected.keys()
    for name, found in parts.items():
        assert torch.equal(torch.cat(found), expected[name].reshape(-1)), name


def test_a_checkpoint_without_averages_is_refused() -> None:
    average = WeightAverage(small_dense(), 0.5)
    with pytest.raises(InputError, match=r"of 0 parameters and none of 'bias', this job keeps 2"):
        average.load_tensors({})
