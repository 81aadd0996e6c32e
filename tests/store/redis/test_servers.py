"""Errors of a server's connection. Refusals of whole stores: test_store, test_tls, test_acl."""

from __future__ import annotations

import pytest
import redis

from bagpipe.errors import InputError
from bagpipe.store.redis.servers import Unreachable
from bagpipe.store.redis.urls import parse_urls

pytestmark = pytest.mark.usefixtures("no_leaks")


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
def test_only_silence_is_retried(error: Exception, kind: type) -> None:
    (server,) = parse_urls("redis://u:secret@host")
    with pytest.raises(InputError, match=r"store redis://u:\*\*\*@host: ") as caught:
        with server.refusals(1.0):
            raise error
    assert type(caught.value) is kind
