"""The cacher that a program uses."""

from __future__ import annotations

import pytest

import bagpipe
from bagpipe.errors import InputError


def test_an_address_is_enough() -> None:
    assert bagpipe.Cacher("unix:/run/c.sock") == bagpipe.Cacher("unix:/run/c.sock", secret_file="", timeout_s=30.0)
    assert bagpipe.Cacher("grpcs://host:7000").address().tls


@pytest.mark.parametrize("url", ["", "thread", "http://host:1", "host:99999"])
def test_another_form_of_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"^the address of a cacher must be unix:PATH, HOST:PORT, "):
        bagpipe.Cacher(url)


@pytest.mark.parametrize("timeout_s", [0, -1.0, "soon"])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(InputError, match="timeout_s must be a number of seconds above 0"):
        bagpipe.Cacher("unix:/run/c.sock", timeout_s=timeout_s)
