from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.redis.rights import COMMANDS, ask_rights, refuse_missing_rights
from bagpipe.store.server.embedded import EmbeddedServer
from tests.store.clients import client_of

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    with EmbeddedServer(tmp_path) as server, client_of(server.url) as client:
        yield client


def asked(client: redis.Redis, *rules: str) -> list[bytes]:
    """What a user with these rules, besides EVAL, may not run."""
    client.execute_command("ACL", "SETUSER", "trainer", "reset", "on", "nopass", "+eval", *rules)
    client.execute_command("AUTH", "trainer", "x")
    return list(client.execute_command(*ask_rights(b"job:{0}").words))


def test_a_user_that_may_do_all(client: redis.Redis) -> None:
    assert asked(client, "~job:*", "+@all") == []
    assert asked(client, "~job:*", *(f"+{name}" for name in COMMANDS), "+acl", "+auth") == []


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"eval"}))
def test_each_command_is_asked_for(client: redis.Redis, command: str) -> None:
    assert asked(client, "~job:*", "+@all", f"-{command}") == [command.encode()]


def test_keys_are_asked_for_too(client: redis.Redis) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        asked(client, "~other:*", "+@all")


def test_the_refusal_names_all() -> None:
    refuse_missing_rights("there", [])
    with pytest.raises(
        InputError, match=r"store there: the user may not run commands .*: 'hset', 'set'; see docs/store.md"
    ):
        refuse_missing_rights("there", [b"hset", b"set"])
