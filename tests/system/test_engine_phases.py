"""A stop request during any engine phase loses no trained batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.digest import embedding_digest
from bagpipe.training.engine import Engine
from cacher.planning import PlannedData
from tests.system.jobs import change, run_job
from tests.system.streams import ForgetfulStore
from trainer.assembly import BuiltModel, build_engine, build_training_model

MakeConfig = Callable[..., Config]


@pytest.fixture
def built(clicks: MakeConfig) -> BuiltModel:
    config = change(clicks(eval_fraction=0.3), cache__rows=10_000)
    return build_training_model(config, PlannedData(config.data, config.run.seed).schema)


def steps_of(built: BuiltModel, phase: str = "train") -> Iterator[RankBatch]:
    return PlannedData(built.config.data, built.config.run.seed).batches(phase, built.spec)  # type: ignore[arg-type]


class Interrupting(ForgetfulStore):
    """A store that sends SIGINT to its process in the middle of the n-th write."""

    def __init__(self, store: MemoryStore, *, at_write: int, number: signal.Signals) -> None:
        super().__init__(store)
        self._left = at_write
        self._number = number

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        self._left -= bool(requests)
        if requests and self._left == 0:
            os.kill(os.getpid(), self._number)
        self.inner.write_many(requests)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_last_write_back_loses_nothing(built: BuiltModel, number: signal.Signals) -> None:
    with MemoryStore(built.rows, num_buckets=8) as store:
        # The cache holds every row, so the first write is that of the final write-back, in this (the main) thread.
        counting = ForgetfulStore(store)
        build_engine(built, counting).train(steps_of(built))
        num_rows = counting.rows_written
        config = built.config
        engine = build_engine(build_training_model(config, built.data), Interrupting(store, at_write=1, number=number))
        result = engine.train(steps_of(built))
        assert result.report.stopped
        assert result.progress.rows_written == num_rows
        assert embedding_digest(store) == run_job(change(config, data__eval_fraction=0.3)).embedding_digest


def test_handlers_of_signals_are_put_back(built: BuiltModel) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with MemoryStore(built.rows, num_buckets=8) as store:
        build_engine(built, store).train(steps_of(built))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interrupted_evaluation_says_so(built: BuiltModel) -> None:
    with MemoryStore(built.rows, num_buckets=8) as store:
        engine = build_engine(built, store)
        engine.train(steps_of(built))
        before = embedding_digest(store)
        scored: list[torch.Tensor] = []

        def interrupt(logits: torch.Tensor, labels: torch.Tensor) -> None:
            scored.append(logits)
            if len(scored) == 1:
                os.kill(os.getpid(), signal.SIGINT)

        result = engine.evaluate(steps_of(built, "eval"), interrupt)
        assert result.report.stopped
        assert embedding_digest(store) == before


def test_an_engine_trains_again(built: BuiltModel) -> None:
    """A phase leaves the cache empty; the next phase continues from the store."""
    with MemoryStore(built.rows, num_buckets=8) as store:
        engine = build_engine(built, store)
        totals = [engine.train(steps_of(built)).progress for _ in range(2)]
        assert engine.cache.statistics().resident == 0
        assert totals[0].rows_fetched == 0, "in a namespace made by this job a new row is not asked for"
        assert totals[1].rows_fetched == totals[1].rows_inserted == totals[0].rows_inserted


def bad_after(batches: Iterator[RankBatch], count: int) -> Iterator[RankBatch]:
    for _ in range(count):
        yield next(batches)
    raise InputError("file.tsv:7: bad")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_bad_data_ends_a_phase_after_the_good_steps(built: BuiltModel, count: int) -> None:
    with MemoryStore(built.rows, num_buckets=8) as store:
        engine = build_engine(built, store)
        result = engine.train(bad_after(steps_of(built), count))
        assert str(result.input_error) == "file.tsv:7: bad"
        assert result.progress.steps == count
        assert store.check() is (count > 0), "without a good step the store is left alone"
        if count:
            config = change(built.config, run__steps=count, data__eval_fraction=0.3)
            assert embedding_digest(store) == run_job(config).embedding_digest


def test_an_empty_data_set(built: BuiltModel) -> None:
    with MemoryStore(built.rows, num_buckets=8) as store:
        engine: Engine = build_engine(built, store)
        result = engine.train(iter(()))
        assert (result.progress.steps, result.progress.hit_rate) == (0, 0.0)
        assert np.isfinite(float(result.progress.loss_sum))
        assert store.check() is False
