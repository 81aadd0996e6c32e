from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls


def test_urls_are_split_where_another_begins() -> None:
    servers = parse_urls("redis://a:1, unix:///tmp/x,y.sock?db=3,rediss://u:p%2C@b/2")
    assert [server.endpoint for server in servers] == ["redis://a:1", "unix:///tmp/x,y.sock?db=3", "rediss://u:***@b/2"]
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
        ("redis://a,redis+cluster://u:secret@b", r"redis\+cluster://u:\*\*\*@b is a cluster .* cannot stand in a list"),
        ("redis://u:secret/1@host", "must be percent-encoded"),
        ("redis://u:secret#1@host:1", "must be percent-encoded"),
        ("redis://u:secret:x@host:port", "cannot be read: is it percent-encoded"),
        ("rediss://host?ssl_ca_certs=/no/file", r"ssl_ca_certs of rediss://host.* names no file: /no/file"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_urls(url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_nodes_of_a_cluster_share_user_and_options() -> None:
    nodes = parse_cluster_url("rediss+cluster://u:p%2C@a:1, b,[::1]:3?ssl_check_hostname=false")
    assert [node.endpoint for node in nodes] == [
        "rediss+cluster://a:1",
        "rediss+cluster://b:6379",
        "rediss+cluster://[::1]:3",
    ]
    assert {node.settings["password"] for node in nodes} == {"p,"}
    assert not any(node.settings["ssl_check_hostname"] for node in nodes)
    assert "p," not in repr(nodes)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+cluster://", "must name host:port"),
        ("redis+cluster://a:1,,b:2", "must name host:port"),
        ("redis+cluster://a:1,b:2/3", "names database 3, a cluster has only 0"),
        ("redis+cluster://u:secret@a:x", "cannot be read"),
        ("redis+cluster://a:1,b:2,a:1", "names a node twice: a:1"),
        ("redis+cluster://a:1,redis+cluster://b:2", "must be one redis"),
        ("redis+cluster://a:1?db=1", "names database 1"),
    ],
)
def test_a_bad_cluster_url_is_refused_in_one_line(url: str, message: str) -> None:
    assert is_cluster_url(url)
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster_url(url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
