"""The store's password, given apart from its URL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.store.passwords import with_password
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls

URLS = (
    "redis://10.0.0.1",
    "redis://trainer@10.0.0.1:6379/3",
    "redis://a:6379, redis://trainer@b:6380?db=1,unix:///run/a,b.sock",
    "unix://trainer@/run/redis.sock?db=2",
    "rediss://trainer@[::1]:6379",
    "redis+cluster://trainer@a:6379,b:6379",
    "redis+cluster://a,b:6380",
)


@pytest.mark.parametrize("url", URLS)
@given(password=st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), min_size=1))
def test_every_server_gets_it(url, password):
    parse = parse_cluster_url if is_cluster_url(url) else parse_urls
    plain, protected = parse(url), parse(with_password(url, password))
    assert [server.settings | {"password": password} for server in plain] == [server.settings for server in protected]
    assert not any(f":{password}@" in server.endpoint for server in protected if len(password) > 3)


def test_no_password_changes_nothing():
    assert with_password("redis://a", "") == "redis://a"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "redis://trainer:Xk3@a",
            "store.url holds a password, and store.password_file or BAGPIPE_STORE_PASSWORD another",
        ),
        ("unix:///run/s?password=Xk3", "store.url holds a password, and"),
        ("memory://", "store.url is memory://, which has no password"),
        ("/run/redis.sock", "store.url must begin with redis://"),
    ],
)
def test_what_is_refused(url, message):
    with pytest.raises(InputError) as caught:
        with_password(url, "other")
    assert str(caught.value).startswith(message)
    assert "Xk3" not in str(caught.value)
    assert "other" not in str(caught.value).replace("another", "")
