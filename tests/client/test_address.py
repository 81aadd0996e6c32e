"""Addresses of cachers."""

from __future__ import annotations

import pytest

from bagpipe.client.address import Address, parse_address
from bagpipe.errors import InputError


@pytest.mark.parametrize(
    ("text", "address", "target", "is_local"),
    [
        ("unix:/run/c.sock", Address(path="/run/c.sock"), "unix:/run/c.sock", True),
        ("unix:///run/c.sock", Address(path="/run/c.sock"), "unix:/run/c.sock", True),
        ("unix:c.sock", Address(path="c.sock"), "unix:c.sock", True),
        ("localhost:70", Address(host="localhost", port=70), "localhost:70", True),
        ("127.0.0.2:0", Address(host="127.0.0.2", port=0), "127.0.0.2:0", True),
        ("[::1]:70", Address(host="::1", port=70), "[::1]:70", True),
        ("0.0.0.0:70", Address(host="0.0.0.0", port=70), "0.0.0.0:70", False),
        ("grpc://10.0.0.1:70", Address(host="10.0.0.1", port=70), "10.0.0.1:70", False),
        (
            "grpcs://node-1.example:65535",
            Address(host="node-1.example", port=65535, tls=True),
            "node-1.example:65535",
            False,
        ),
    ],
)
def test_addresses(text: str, address: Address, target: str, is_local: bool) -> None:
    parsed = parse_address(text)
    assert parsed == address
    assert parsed.target == target
    assert parsed.is_local is is_local
    assert parse_address(str(parsed)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:", "host", "host:", ":70", "host:70000", "http://host:70", "a b:1", "h:1/x"]
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(InputError, match=r"^--listen must be unix:PATH, HOST:PORT.*got "):
        parse_address(text, subject="--listen")


def test_a_path_too_long_for_a_socket() -> None:
    with pytest.raises(InputError, match="expected a socket path of at most 107 bytes, got 108"):
        parse_address("unix:/" + "x" * 107)


def test_a_path_may_have_any_bytes_but_commas() -> None:
    """gRPC reads addresses as URLs, and a comma as the end of one."""
    address = parse_address("unix:/tmp/a b/50%41/?#/caf\udce9")
    assert address.target == "unix:/tmp/a%20b/50%2541/%3F%23/caf%E9"
    assert parse_address(str(address)) == address
    with pytest.raises(InputError, match=r"cacher.url: expected a socket path without commas, got /tmp/a,b"):
        parse_address("unix:/tmp/a,b")
