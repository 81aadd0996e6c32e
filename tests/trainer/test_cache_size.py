"""Rows of a job's cache, and jobs whose cache grows: the same bits, up to the bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.sections import CacheConfig, Config, EvalConfig
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec, slots_of
from bagpipe.oracle.planner import plan_batches
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.schema import DataSchema, Feature, Table
from tests.oracle.batches import make_batch
from trainer.cache_size import num_caches_of


def _schema() -> DataSchema:
    return DataSchema(
        label="y", dense=(), tables=(Table(name="t", rows=None),), features=(Feature(name="f", table="t"),)
    )


#: Unique rows by batch: each needs more than all before it.
SIZES = (3, 5, 4, 20, 6, 7, 60, 9, 30, 8, 11, 5)
BATCHES = [
    make_batch(number, [[[(7 * number + example) % 97 for example in range(size)]]])
    for number, size in enumerate(SIZES)
]


def _ends(**settings: Any) -> tuple[tuple[str, str], int]:
    """Digests of a job on the batches, and the slots that its cache has used."""
    plain = PlainSettings(schema=_schema(), lookahead=2, **settings)
    with PlainJob(plain) as job:
        job.train(BATCHES)
        return job.digests(), job.cache.num_slots_used


def test_a_cache_that_grows_in_mid_run_changes_no_bit() -> None:
    direct, _ = _ends()
    assert _ends(cache_rows=97)[0] == direct
    for most in (60, 75, 400):
        digests, slots = _ends(cache_rows=most, grows=True)
        assert digests == direct
        assert slots_of(60) <= slots + 60 // 6 <= slots_of(most) + 60 // 6


def test_a_batch_above_the_bound_names_the_key() -> None:
    spec = OracleSpec(
        table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=59, lookahead=2, grows=True
    )
    with pytest.raises(CapacityError, match=r"cache\.rows auto holds at most 59: raise cache\.max_rows to at least 60"):
        list(plan_batches(BATCHES, spec))


def test_evaluations_during_training_have_a_cache_of_their_own() -> None:
    assert num_caches_of(Config()) == 1
    assert num_caches_of(dataclasses.replace(Config(), eval=EvalConfig(every=3))) == 2


def test_the_keys() -> None:
    parsed = parse_config(["--cache.rows=auto", "--cache.max_rows=7"], "p").config.cache
    assert (parsed.rows, parsed.max_rows) == ("auto", 7)
    assert CacheConfig().rows == parse_config(["--cache.rows=100_000"], "p").config.cache.rows
    for words, problem in (
        (["--cache.rows=many"], "--cache.rows must be an integer or auto, got 'many'"),
        (["--cache.rows=-1"], "--cache.rows must be at least 0, or auto, got -1"),
        (["--cache.max_rows=7"], "--cache.max_rows 7 needs cache.rows auto, got 100000"),
    ):
        with pytest.raises(InputError, match=f"^{problem}$"):
            parse_config(words, "p")
