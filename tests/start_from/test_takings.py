"""Takings as text and JSON."""

from __future__ import annotations

import json

from bagpipe.start_from.takings import Fate, Taking, Takings, matches

USER = Taking(kind="rows", name="user", fate=Fate.TAKEN, detail="12 rows of 4 float32", state="adagrad: taken")
SHOP = Taking(kind="rows", name="shop", fate=Fate.NEW, detail="not there", state="adagrad: new")
SCHEDULE = Taking(kind="job", name="schedule", fate=Fate.TAKEN, detail="learning rates go on at step 8")


def test_a_table_for_people() -> None:
    assert Takings(source="s", items=(USER, SHOP, SCHEDULE)).lines() == [
        "                                                     optimizer state",
        "rows.user     taken  12 rows of 4 float32            adagrad: taken",
        "rows.shop     new    not there                       adagrad: new",
        "job.schedule  taken  learning rates go on at step 8",
    ]


def test_parameters_that_are_all_taken_are_counted() -> None:
    dense = tuple(Taking(kind="dense", name=f"w{n}", fate=Fate.TAKEN, state="taken") for n in range(30))
    lines = Takings(source="s", items=(USER, *dense, SCHEDULE)).lines()
    assert len(lines) == 1 + 1 + 12 + 1 + 1
    assert lines[-1] == "and 18 more dense parameters and buffers, taken with their state"


def test_json_and_back() -> None:
    takings = Takings(source="s", items=(USER, SHOP, SCHEDULE))
    assert Takings.from_json(json.loads(json.dumps(takings.to_json()))) == takings
    assert not takings.is_empty
    assert Takings(source="s", items=(SHOP, SCHEDULE)).is_empty


def test_patterns_name_things() -> None:
    assert matches("rows.user", ["dense.*", "rows.us*"])
    assert not matches("state.rows.user", ["rows.*"])
