"""Keys that do not go with data that grows are refused in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bagpipe.config.rules import check_config
from bagpipe.config.sections import CacherConfig, Config, DataConfig
from bagpipe.errors import InputError

STREAM = DataConfig(path="days", format="criteo-tsv", eval_fraction=0.0, follow="age")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, ""),
        ({"limit": 100, "until": "2026-11-26T18:00:00+01:00", "stream_idle_s": 5.0, "eval_path": "held_out"}, ""),
        ({"path": ""}, "data.format criteo-tsv needs data.path, a file or folder, got none"),
        (
            {"format": "movielens"},
            "data.follow age needs data.format avazu-csv, criteo-tsv, csv, parquet or tfrecord, got movielens",
        ),
        ({"epochs": 2}, "data.follow age needs data.epochs 1, got 2: a stream is read once"),
        (
            {"shuffle": True},
            "data.follow age needs data.shuffle false, got true: the order of a stream is that of its arrival",
        ),
        (
            {"eval_fraction": 0.1},
            "data.follow age needs data.eval_fraction 0, got 0.1: a stream has no last examples; data.eval_path names "
            "files for evaluation",
        ),
        (
            {"follow": "off", "until": "2026-11-26"},
            "data.until 2026-11-26 needs a stream: data.follow marker or age, or data.path kafka://…",
        ),
        (
            {"follow": "off", "stream_idle_s": 5.0},
            "data.stream_idle_s 5.0 needs a stream: data.follow marker or age, or data.path kafka://…",
        ),
        (
            {"follow": "off", "stream_wait_s": 0.5},
            "data.stream_wait_s 0.5 needs a stream: data.follow marker or age, or data.path kafka://…",
        ),
        ({"follow_age_s": 0.0, "stream_wait_s": 0.5}, ""),
        ({"follow": "marker", "follow_age_s": 0.0}, "data.follow_age_s 0.0 needs data.follow age"),
        ({"kafka_run": 32}, "data.kafka_run 32 needs a topic: data.path kafka://…"),
        ({"kafka_config": "client"}, "data.kafka_config client needs a topic: data.path kafka://…"),
        (
            {
                "follow": "off",
                "path": "kafka://host:9092/clicks",
                "kafka_run": 32,
                "kafka_config": "client",
                "stream_wait_s": 0.5,
            },
            "",
        ),
        (
            {"until": "tonight"},
            "data.until must be a time such as 2026-11-26T18:00:00+01:00, or empty, got 'tonight'",
        ),
        ({"follow": "off", "path": "kafka://host:9092/clicks"}, ""),
        (
            {"path": "kafka://host:9092/clicks"},
            "data.follow age is for a folder, and data.path kafka://host:9092/clicks is a topic",
        ),
        ({"path": "s3://logs/days"}, "data.follow age is for a local folder, got data.path s3://logs/days"),
        (
            {"follow": "off", "path": "kafka://host:9092/clicks", "format": "parquet"},
            "data.path kafka://host:9092/clicks needs data.format criteo-tsv or csv, the lines of its messages, got "
            "parquet",
        ),
        (
            {"follow": "off", "path": "kafka://host:9092/clicks", "epochs": 3},
            "data.path kafka://host:9092/clicks needs data.epochs 1, got 3: a stream is read once",
        ),
        ({"stream_wait_s": 0.0}, "data.stream_wait_s must be more than 0, got 0.0"),
    ],
)
def test_streams(changes: dict[str, Any], line: str) -> None:
    _check(Config(data=dataclasses.replace(STREAM, **changes)), line)


def test_an_assignment_that_learns_needs_the_first_batches() -> None:
    _check(
        Config(data=STREAM, cacher=CacherConfig(assign="locality")),
        "data.follow age needs cacher.assign contiguous, got locality, which learns from all batches since the first",
    )


def _check(config: Config, line: str) -> None:
    if not line:
        check_config(config)
        return
    with pytest.raises(InputError) as refused:
        check_config(config)
    assert str(refused.value) == line
