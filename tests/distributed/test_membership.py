from __future__ import annotations

import socket

import pytest

from bagpipe.distributed.membership import Membership, interface_of, local_address
from bagpipe.errors import InputError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_membership_from_torchrun() -> None:
    assert Membership.from_environment(TORCHRUN) == Membership(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        address="10.0.0.1",
        port=29500,
        attempt=2,
        store_is_launchers=True,
    )


def test_membership_from_other_launchers() -> None:
    some = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    membership = Membership.from_environment(some)
    assert membership is not None
    assert (membership.attempt, membership.store_is_launchers, membership.local_world_size) == (0, False, 4)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "", "RANK": "7"}])
def test_one_rank_needs_no_launcher(environment: dict[str, str]) -> None:
    assert Membership.from_environment(environment) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "", "expected RANK in the environment to be a number from 0 to 3, got ''"),
        ("RANK", "4", "RANK in the environment to be a number from 0 to 3, got '4'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE in the environment to be a number of at least 1, got 'two'"),
        ("MASTER_PORT", "0", "MASTER_PORT in the environment to be a number from 1 to 65535"),
        ("MASTER_ADDR", "", "MASTER_ADDR is expected in the environment"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK in the environment to be a number of at least 0"),
    ],
)
def test_a_wrong_environment_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Membership.from_environment({**TORCHRUN, name: value})


def test_the_interface_towards_an_address() -> None:
    assert local_address("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert interface_of("192.0.2.1") is None  # reserved for documentation: no interface has it
    assert local_address("no such host.", 1) is None
