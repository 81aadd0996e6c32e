"""Draws are pure and valid, and together they reach every value of the configuration space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import pytest

from bagpipe.config.keys import config_keys
from bagpipe.schedule.registry import TRAINED_SCHEDULES
from bagpipe.types.schema import FROZEN
from bagpipe.util.failpoints import POINTS
from tests.harness.fuzz.draw import NOWHERE, Draw, settings_of
from tests.harness.fuzz.drawing import FACTORIES, STORES, draw
from tests.harness.fuzz.log import BAG_LENGTHS, ID_LAWS, LABEL_LAWS
from tests.harness.fuzz.log_files import SHAPES
from tests.harness.fuzz.space import JOB, LEFT, MODEL, SET, TWIN, choices_of, config_of

NUM_DRAWS = 400


@cache
def drawn() -> tuple[Draw, ...]:
    return tuple(draw(7, number) for number in range(NUM_DRAWS))


@cache
def reached() -> Mapping[str, set[str]]:
    """All values drawn, by key."""
    found: dict[str, set[str]] = defaultdict(set)
    for item in drawn():
        for twin in item.twins:
            for path, value in settings_of(item, twin, NOWHERE).items():
                found[path].add(value)
    return found


def values_of(path: str) -> set[str]:
    """All values drawn of a key."""
    return reached().get(path, set())


def test_a_draw_is_a_function_of_seed_and_number() -> None:
    assert [draw(7, number) for number in range(20)] == list(drawn()[:20])
    assert draw(7, 0) != draw(8, 0)
    assert len({str(item.job) for item in drawn()}) > NUM_DRAWS * 0.99


#: The kernels of Triton need its interpreter or a device.
UNREACHED = {
    "run.kernels": {"triton"},
    "data.follow": {"off", "marker"},  # the default; a file beside each file
    "model.name": {"esmm"},  # it needs two labels
}


def test_every_key_is_drawn_set_or_left_for_a_reason() -> None:
    """A new key needs its values in `space`, or a reason there."""
    groups = [*JOB, MODEL, TWIN, dict.fromkeys(SET), LEFT]
    paths = [path for group in groups for path in group]
    assert sorted(paths) == sorted(key.path for key in config_keys())


def test_draws_are_valid() -> None:
    for item in drawn():
        for twin in item.twins:
            config_of(settings_of(item, twin, NOWHERE))


@pytest.mark.parametrize("path", [key.path for key in config_keys() if choices_of(key.path) and key.path not in LEFT])
def test_every_value_of_an_enumerated_key_is_reached(path: str) -> None:
    assert values_of(path) | UNREACHED.get(path, set()) == set(choices_of(path))


@pytest.mark.parametrize(("path", "values"), [pair for group in (*JOB, MODEL, TWIN) for pair in group.items()])
def test_every_value_in_the_tables_is_reached(path: str, values: dict[str, float]) -> None:
    assert values_of(path) >= set(values)


def test_every_kind_of_data_store_model_and_end_is_reached() -> None:
    logs = [item.log for item in drawn()]
    columns = [column for log in logs for column in log.columns]
    tables = [table for log in logs for table in log.tables]
    twins = [twin for item in drawn() for twin in item.twins]
    kills = [kill for twin in twins for kill in twin.kills]
    assert {(log.format, log.shape) for log in logs} == {(name, shape) for name in SHAPES for shape in SHAPES[name]}
    assert {log.labels for log in logs} == set(LABEL_LAWS)
    assert {column.law for column in columns} == set(ID_LAWS)
    assert {column.bag for column in columns} == set(BAG_LENGTHS)
    assert {column.missing for column in columns} >= {0.0, 1.0}
    assert {table.pooling for table in tables} == {"sum", "mean", "none"}
    assert any(table.hash for table in tables)
    assert any(column.weighted for column in columns)
    assert any(log.num_bad for log in logs)
    assert values_of("model.factory") == set(FACTORIES)
    assert values_of("pipeline.schedule") == {"none", *TRAINED_SCHEDULES}
    assert {item.world_size for item in drawn()} == {1, 2, 3, 4}
    assert all(values_of(f"checkpoint.start_{name}") for name in ("from", "without"))
    assert any(item.log.num_examples < item.world_size for item in drawn())
    assert {twin.store for twin in twins} == {*STORES, "own", "own-durable"}
    assert {twin.cacher for twin in twins} == {"daemon", "own"}
    assert {kill.point for kill in kills} == set(POINTS)
    optimizers = {value.partition("=")[2] for value in values_of("optim.rows_by_table")}
    assert optimizers == {*choices_of("optim.rows"), FROZEN}
    assert {len(values_of(key)) > 0 for key in ("optim.rows_lr_by_table", "model.loss_weights")} == {True}
    assert {kill.signal for kill in kills} == {"SIGKILL", "SIGINT"}
    assert {len(item.twins[2].kills) for item in drawn()} == {1, 2, 3}


def test_a_cluster_is_drawn_where_there_is_one() -> None:
    stores = (*STORES, "cluster")
    assert any(twin.store == "cluster" for number in range(30) for twin in draw(7, number, stores=stores).twins)
