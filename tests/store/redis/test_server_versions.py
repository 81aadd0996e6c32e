"""Releases of servers without the fixes of their scripting, or of how they load an append-only file."""

from __future__ import annotations

import pytest

from bagpipe.store.redis.server_versions import drops_transactions, scripting_advice


def advice(name: str, version: str, endpoint: str = "redis://store:6379") -> str:
    # Valkey also states the Redis version that it is compatible with.
    info = {"redis_version": version} if name == "redis" else {"redis_version": "7.2.4", "server_name": name}
    return scripting_advice(endpoint, info | {f"{name}_version": version})


@pytest.mark.parametrize(
    ("name", "first_safe"),
    [
        ("redis", "6.2.20"),
        ("redis", "7.2.11"),
        ("redis", "7.4.6"),
        ("redis", "8.0.4"),
        ("redis", "8.2.2"),
        ("valkey", "7.2.11"),
        ("valkey", "8.0.6"),
        ("valkey", "8.1.4"),
    ],
)
def test_a_line_is_safe_from_its_fix_on(name: str, first_safe: str) -> None:
    line, _, patch = first_safe.rpartition(".")
    assert advice(name, first_safe) == ""
    assert advice(name, f"{line}.{int(patch) + 1}") == ""
    said = advice(name, f"{line}.{int(patch) - 1}")
    assert f"store redis://store:6379 runs {name} {line}.{int(patch) - 1}: users who may run scripts" in said
    assert "CVE-2025-49844" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "version", "is_safe"),
    [
        ("redis", "7.0.15", False),
        ("redis", "5.0.7", False),
        ("redis", "8.4.0", True),
        ("valkey", "9.0.0", True),
        ("valkey", "9.1.2", True),
        ("redis", "", True),
        ("redis", "unstable", True),
        ("dragonfly", "1.0.0", True),
    ],
)
def test_other_lines(name: str, version: str, is_safe: bool) -> None:
    assert (advice(name, version) == "") == is_safe


def test_a_compatible_server_is_left_out() -> None:
    info = {"redis_version": "7.0.15", "dragonfly_version": "df-v1.30.0"}
    assert scripting_advice("redis://store:6379", info) == ""


def test_the_private_server_of_a_job_is_left_out() -> None:
    assert advice("redis", "7.0.15", "unix:///run/job/store.sock") == ""


@pytest.mark.parametrize(
    ("name", "version", "drops"),
    [
        ("redis", "6.2.14", True),
        ("redis", "7.0.15", True),
        ("redis", "8.2.3", True),
        ("redis", "8.6.0", False),
        ("valkey", "8.1.9", True),
        ("valkey", "9.1.1", True),
        ("valkey", "9.1.2", False),
        ("valkey", "10.0.0", False),
        ("redis", "unstable", False),
        ("dragonfly", "1.0.0", False),
    ],
)
def test_servers_that_drop_transactions_from_their_append_only_file(name: str, version: str, drops: bool) -> None:
    info = {"redis_version": "7.2.4", "server_name": name, f"{name}_version": version}
    assert drops_transactions(info | {"aof_enabled": 1}) == drops
    assert not drops_transactions(info | {"aof_enabled": 0})
