"""What a server is asked once. Refusals of whole stores: test_redis, test_tls, test_acl."""

from __future__ import annotations

import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.redis.servers import Unreachable, refuse_unsafe
from bagpipe.store.redis.urls import parse_urls

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"maxmemory": 0}, "INFO does not tell maxmemory_policy"),
        (
            {"maxmemory": 10, "maxmemory_policy": "allkeys-lru"},
            "there drops rows when full: maxmemory 10 .* allkeys-lru",
        ),
    ],
)
def test_a_server_that_may_drop_rows(info: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        refuse_unsafe("there", info)


def test_a_server_that_keeps_rows() -> None:
    refuse_unsafe("there", {"maxmemory": 10, "maxmemory_policy": "noeviction"})
    refuse_unsafe("there", {"maxmemory": 0, "maxmemory_policy": "allkeys-lru"})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.ConnectionError("x"), Unreachable),
        (redis.TimeoutError("x"), Unreachable),
        (redis.exceptions.BusyLoadingError("x"), Unreachable),
        (OSError("x"), Unreachable),
        (redis.AuthenticationError("x"), InputError),
        (redis.InvalidResponse("x"), InputError),
        (redis.ResponseError("x"), InputError),
    ],
)
def test_only_silence_is_worth_another_try(error: Exception, kind: type) -> None:
    (server,) = parse_urls("redis://u:secret@host")
    with pytest.raises(InputError, match=r"store redis://u:\*\*\*@host: ") as caught:
        with server.refusals(1.0):
            raise error
    assert type(caught.value) is kind
