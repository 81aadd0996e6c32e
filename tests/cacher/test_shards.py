"""Shards that a cacher cannot use."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.cacher.daemons import refused_daemon

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"shards": "27"}, "cacher.shards: expected at most as many as the data's 26 tables, got 27"),
        ({"shards": "0"}, "cacher.shards must be a number from 1 to 64, or addresses"),
        ({"shards": "2", "shard_tables": "C1,C27"}, "cacher.shard_tables: expected tables of the data, got 'C27'"),
        ({"shards": "2", "shard_tables": "C1,C1"}, "cacher.shard_tables: 'C1' is named twice"),
        (
            {"shards": "1", "shard_tables": "C1,C2"},
            "cacher.shard_tables: expected the tables of at most 1 shards, got 2",
        ),
        ({"shards": "unix:/nowhere.sock", "timeout_s": "0.2"}, "shard 0 (unix:/nowhere.sock) was not reached within"),
    ],
)
def test_a_cacher_whose_shards_cannot_be_used_does_not_start(
    flags: Mapping[str, str], message: str, listen: str
) -> None:
    settings = [f"--cacher.{key}={value}" for key, value in flags.items()]
    code, said = refused_daemon("--listen", listen, "--data.format=synthetic", *settings)
    assert (code, message in said) == (2, True), said


def test_a_job_that_sees_the_whole_log_has_no_shards(listen: str) -> None:
    flags = ("--data.format=synthetic", "--cacher.shards=2", "--oracle.horizon=log")
    code, said = refused_daemon("--listen", listen, *flags)
    assert (code, "expected oracle.horizon window, got log" in said) == (2, True), said
