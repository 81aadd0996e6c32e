"""`Network`: the ports through which ranks send and receive, and how long messages and collectives keep them.

    rank ──out of its host──> network ──into the host──> rank       hosts: one port out, one in, shared by their ranks
    rank ──out──> rank of the same host                             one port each per rank

A message keeps both its ports for ``message_s + bytes / bandwidth`` and arrives ``latency_s`` after that: the model
of Hockney (1994), with one port per direction. Partitioner, simulator and sweep all use it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagpipe.errors import ScheduleError

__all__ = ["Network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ranks, hosts, and the speed of the links between them.

    Attributes:
        bandwidth_bytes_per_s: of a host's port, each direction.
        latency_s: from the end of a message at its sender to its arrival.
        message_s: time a message keeps its ports besides that of its bytes.
        hosts: rank -> its host; a rank that is not listed is alone on a host of its own.
        local_bandwidth_bytes_per_s: between two ranks of one host.
        local_latency_s: between two ranks of one host; None: as between hosts.

    Raises:
        ScheduleError: a bandwidth is not above 0, or a time is negative or infinite.
    """

    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    message_s: float = 0.0
    hosts: Mapping[int, int] = field(default_factory=dict)
    local_bandwidth_bytes_per_s: float = math.inf
    local_latency_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "local_bandwidth_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ScheduleError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("latency_s", "message_s", "local_latency_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ScheduleError(f"{name} must be at least 0 and finite, got {value}")

    def host(self, rank: int) -> tuple[str, int]:
        """The owner of a rank's ports to other hosts: its host, or the rank itself."""
        number = self.hosts.get(rank)
        return ("rank", rank) if number is None else ("host", number)

    def delay_s(self, sender: int, receiver: int) -> float:
        """From the end of a message at its sender to its arrival."""
        if self.local_latency_s is not None and self.host(sender) == self.host(receiver):
            return self.local_latency_s
        return self.latency_s

    def is_one_host(self, ranks: Sequence[int]) -> bool:
        """Whether the ranks need no port to another host."""
        return len({self.host(rank) for rank in ranks}) <= 1

    def all_reduce_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a ring all-reduce over ranks, those of one host next to each other.

        Each of the ``2 (n - 1)`` rounds sends ``bytes / n`` to the next rank; a host's port carries one message of the
        ring in each direction (Patarasuk and Yuan, 2009).
        """
        per_byte_s, fixed_s = self.ring(ranks)
        return num_bytes * per_byte_s + fixed_s

    def ring(self, ranks: Sequence[int]) -> tuple[float, float]:
        """(seconds per byte of the tensor, seconds besides) of `all_reduce_s`."""
        count = len(ranks)
        if count == 1:
            return 0.0, 0.0
        is_local = self.is_one_host(ranks)
        has_both = not is_local and len({self.host(rank) for rank in ranks}) < count
        bandwidth = self.local_bandwidth_bytes_per_s if is_local else self.bandwidth_bytes_per_s
        if has_both:
            bandwidth = min(bandwidth, self.local_bandwidth_bytes_per_s)
        latency_s = self.delay_s(ranks[0], ranks[1]) if is_local else self.latency_s
        return 2 * (count - 1) / count / bandwidth, 2 * (count - 1) * (latency_s + self.message_s)

    def all_gather_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds until every rank has a tensor of which each had a part; of a reduce-scatter too.

        Half the rounds of `all_reduce_s`, which is a reduce-scatter and an all-gather (Chan et al., 2007).
        """
        return self.all_reduce_s(num_bytes, ranks) / 2

    def all_to_all_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds until a tensor that is divided over ranks along one dimension is divided along another.

        Each of n ranks sends ``bytes / n^2`` to each other one, in ``n - 1`` rounds (Thakur et al., 2005, pairwise
        exchange). The busiest port counts: that of the host whose ranks send most to other hosts.
        """
        count = len(ranks)
        if count == 1:
            return 0.0
        if self.is_one_host(ranks):
            sent, bandwidth = count - 1, self.local_bandwidth_bytes_per_s
            latency_s = self.delay_s(ranks[0], ranks[1])
        else:
            sent = max(own * (count - own) for own in Counter(map(self.host, ranks)).values())
            bandwidth, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        return num_bytes * sent / count**2 / bandwidth + (count - 1) * (latency_s + self.message_s)

    def split_batch_s(self, num_bytes: float, senders: Sequence[int], receivers: Sequence[int]) -> float:
        """Seconds until a tensor divided by examples over `senders` has arrived divided over `receivers`.

        The busiest port, and a message's latency. Senders and receivers do not overlap.
        """
        ends = (senders, receivers)
        if self.is_one_host([*senders, *receivers]):
            share, bandwidth = 1 / min(map(len, ends)), self.local_bandwidth_bytes_per_s
            latency_s = self.delay_s(senders[0], receivers[0])
        else:
            # What each host sends to and gets from others: its share of one end times the other end's ranks elsewhere.
            parts = [{host: count / len(end) for host, count in Counter(map(self.host, end)).items()} for end in ends]
            share = max(
                own.get(host, 0.0) * (1 - other.get(host, 0.0))
                for own, other in ((parts[0], parts[1]), (parts[1], parts[0]))
                for host in own
            )
            bandwidth, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        return latency_s + self.message_s + num_bytes * share / bandwidth

    def rank_bandwidth_bytes_per_s(self, num_ranks: int) -> float:
        """Bandwidth of one of `num_ranks` ranks when all send: its share of its host's port; local on one host."""
        ranks = range(num_ranks)
        if num_ranks > 1 and self.is_one_host(ranks):
            return self.local_bandwidth_bytes_per_s
        return self.bandwidth_bytes_per_s / max(Counter(map(self.host, ranks)).values())
