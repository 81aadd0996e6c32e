"""`ShapedHosts`: hosts with one shaped port each: network namespaces on a bridge.

    rank 0 ── veth (tbf) ═══ (tbf) veth ─┐
    rank 1 ── veth (tbf) ═══ (tbf) veth ─┼─ bridge ─ this process (the key-value store)      198.18.9.0/24 (RFC 2544)
    …                                    ┘

The token bucket of a veth's inner end limits what a host sends; that of its outer end limits what it receives.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from benchmarks.harness.shaped_link import run_command

__all__ = ["ShapedHosts"]

_NETWORK = "198.18.9"
#: Burst of the token buckets: one segment that TCP hands down as a whole.
_BURST_BYTES = 64 * 1024
#: Longest stay in a queue before packets are dropped.
_QUEUE_LATENCY = "100ms"


class ShapedHosts:
    """Hosts on a bridge. One `with` creates and removes everything.

    Args:
        num_hosts: hosts.
        rate: of each port in each direction, as `tc` writes it.

    Attributes:
        address: of this process, for the hosts.

    Raises:
        InputError: on `__enter__`: a command failed.
    """

    def __init__(self, num_hosts: int, rate: str) -> None:
        self.num_hosts = num_hosts
        self.rate = rate
        self.address = f"{_NETWORK}.254"
        self._tag = f"bp{os.getpid() % 100_000}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            bridge = f"{self._tag}b"
            run_command("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(run_command, "ip", "link", "del", bridge)
            run_command("ip", "address", "add", f"{self.address}/24", "dev", bridge)
            run_command("ip", "link", "set", bridge, "up")
            for host in range(self.num_hosts):
                self._add(host, bridge, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def inside(self, host: int) -> tuple[str, ...]:
        """Words before a command that runs it on a host."""
        return ("ip", "netns", "exec", self._name(host))

    def _name(self, host: int) -> str:
        return f"bagpipe-resharding-{os.getpid()}-{host}"

    def _add(self, host: int, bridge: str, stack: ExitStack) -> None:
        name, outer, inner = self._name(host), f"{self._tag}o{host}", f"{self._tag}i{host}"
        run_command("ip", "netns", "add", name)
        stack.callback(run_command, "ip", "netns", "del", name)
        run_command("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        run_command("ip", "link", "set", outer, "master", bridge, "up")
        inside = self.inside(host)
        run_command(*inside, "ip", "address", "add", f"{_NETWORK}.{host + 1}/24", "dev", inner)
        run_command(*inside, "ip", "link", "set", inner, "up")
        run_command(*inside, "ip", "link", "set", "lo", "up")
        shape = ("root", "tbf", "rate", self.rate, "burst", str(_BURST_BYTES), "latency", _QUEUE_LATENCY)
        run_command("tc", "qdisc", "add", "dev", outer, *shape)
        run_command(*inside, "tc", "qdisc", "add", "dev", inner, *shape)
