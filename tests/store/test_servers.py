from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.store.servers import parse_urls, redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/1", "redis://host:6379/1"),
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://user:secret@host:1", "redis://user:***@host:1"),
        ("redis://user:se%40cret@host:1", "redis://user:***@host:1"),
        ("rediss://user@host", "rediss://user@host"),
        ("unix:///tmp/s.sock?db=2&password=secret", "unix:///tmp/s.sock?db=2&password=***"),
        ("unix://u:secret@/tmp/s.sock", "unix://u:***@/tmp/s.sock"),
        ("redis://[u:a/b@c@host", "redis://[u:***@host"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_urls_are_split_where_another_begins() -> None:
    servers = parse_urls("redis://a:1, unix:///tmp/x,y.sock?db=3,rediss://u:p%2C@b/2")
    assert [server.place for server in servers] == ["redis://a:1", "unix:///tmp/x,y.sock?db=3", "rediss://u:***@b/2"]
    assert [server.settings["db"] for server in servers] == [0, 3, 2]
    assert servers[2].settings["password"] == "p,"
    assert "p," not in repr(servers)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://host:port", "cannot be read"),
        ("redis://host/name", "must be a database number, got 'name'"),
        ("unix://", "names no socket"),
        ("unix:///s?db=x", "cannot be read"),
        (
            "redis://u:secret@host?decode_responses=1",
            r"redis://u:\*\*\*@host.* has the option 'decode_responses', known",
        ),
        ("redis://a,redis://b,redis://a", "names a server twice: redis://a"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_urls(url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
