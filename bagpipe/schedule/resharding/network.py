"""`Network`: the ports through which ranks send and receive, and how long a message keeps them.

    rank ──out of its host──> network ──into the host──> rank       hosts: one port out, one in, shared by their ranks
    rank ──out──> rank of the same host                             one port each per rank

A message keeps both its ports for ``message_s + bytes / bandwidth`` and arrives ``latency_s`` after that: the model
of Hockney (1994), with one port per direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bagpipe.errors import ScheduleError

__all__ = ["Network", "Port"]

#: ("host" or "rank", its number, "out" or "in").
Port = tuple[str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ranks, hosts, and the speed of the links between them.

    Attributes:
        bandwidth_bytes_per_s: of a host's port, each direction.
        latency_s: from the end of a message at its sender to its arrival.
        message_s: time a message keeps its ports besides that of its bytes.
        hosts: rank -> its host; a rank that is not listed is alone on a host of its own.
        local_bandwidth_bytes_per_s: between two ranks of one host.

    Raises:
        ScheduleError: a bandwidth is not above 0, or a time is negative or infinite.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    message_s: float = 0.0
    hosts: Mapping[int, int] = field(default_factory=dict)
    local_bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "local_bandwidth_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ScheduleError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("latency_s", "message_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ScheduleError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def host(self, rank: int) -> tuple[str, int]:
        """The owner of a rank's ports to other hosts: its host, or the rank itself."""
        number = self.hosts.get(rank)
        return ("rank", rank) if number is None else ("host", number)

    def ports(self, sender: int, receiver: int) -> tuple[Port, Port]:
        """The ports that a message keeps."""
        ends = self.host(sender), self.host(receiver)
        if ends[0] == ends[1]:
            ends = ("local", sender), ("local", receiver)
        return (*ends[0], "out"), (*ends[1], "in")

    def busy_s(self, sender: int, receiver: int, num_bytes: float) -> float:
        """How long a message keeps its ports."""
        is_local = self.host(sender) == self.host(receiver)
        bandwidth = self.local_bandwidth_bytes_per_s if is_local else self.bandwidth_bytes_per_s
        return self.message_s + num_bytes / bandwidth
