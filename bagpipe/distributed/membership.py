"""`Membership`: this process's rank in its job, from the launcher's environment variables.

    torchrun ──RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT──> Membership
    torchrun ──TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_USE_AGENT_STORE──┘

Any launcher that sets the first line works. Only torchrun sets the second line.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from bagpipe.errors import InputError

__all__ = ["Membership", "interface_of", "local_address"]

#: ioctl(2) request for an interface's IPv4 address, from linux/sockios.h.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Rank, world size and rendezvous address of one process.

    Attributes:
        rank, world_size: this rank, from 0, and the number of ranks.
        local_rank, local_world_size: the same among the ranks of this host.
        address, port: address of the job's key-value store.
        attempt: number of restarts by the launcher.
        store_is_launchers: the launcher hosts the store; otherwise rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    attempt: int = 0
    store_is_launchers: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Membership | None:
        """Membership of this process; None for a job of one rank, which needs no launcher.

        Raises:
            InputError: a variable is missing, not a number, or out of range.
        """
        values = os.environ if environment is None else environment
        world_size = _number(values, "WORLD_SIZE", 1, minimum=1)
        if world_size == 1:
            return None
        address = values.get("MASTER_ADDR", "")
        if not address:
            raise InputError("WORLD_SIZE is set, so MASTER_ADDR is expected in the environment; start with torchrun")
        return cls(
            rank=_number(values, "RANK", None, maximum=world_size - 1),
            world_size=world_size,
            local_rank=_number(values, "LOCAL_RANK", 0),
            local_world_size=_number(values, "LOCAL_WORLD_SIZE", world_size, minimum=1),
            address=address,
            port=_number(values, "MASTER_PORT", None, minimum=1, maximum=65535),
            attempt=_number(values, "TORCHELASTIC_RESTART_COUNT", 0),
            store_is_launchers=values.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        )


def local_address(address: str, port: int) -> str | None:
    """This host's IPv4 address on the route to `address`; None without a route. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        found: str = probe.getsockname()[0]
        return found
    return None


def interface_of(address: str) -> str | None:
    """Name of the network interface whose first IPv4 address is `address`, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:  # ifreq: 16 bytes of name, then a sockaddr_in
                    return name
    return None


def _number(
    values: Mapping[str, str], name: str, default: int | None, *, minimum: int = 0, maximum: int | None = None
) -> int:
    text = values.get(name, "")
    if not text and default is not None:
        return default
    range_text = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum or (maximum is not None and number > maximum):
        raise InputError(
            f"expected {name} in the environment to be a number {range_text}, got {text!r}; start with torchrun"
        )
    return number
