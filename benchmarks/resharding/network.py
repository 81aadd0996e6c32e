"""`ShapedHosts`: hosts with one shaped port each: network namespaces on a bridge.

    rank 0 ── veth (tbf) ═══ (tbf) veth ─┐
    rank 1 ── veth (tbf) ═══ (tbf) veth ─┼─ bridge ─ this process (the key-value store)      198.18.9.0/24 (RFC 2544)
    …                                    ┘

The token bucket of a veth's inner end limits what a host sends; that of its outer end limits what it receives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from bagpipe.errors import InputError

__all__ = ["ShapedHosts", "check_privileges"]

_NETWORK = "198.18.9"
#: Burst of the token buckets: one segment that TCP hands down as a whole.
_BURST_BYTES = 64 * 1024
#: Longest stay in a queue before packets are dropped.
_QUEUE_LATENCY = "100ms"


def check_privileges() -> None:
    """Check that namespaces and links can be made.

    Raises:
        InputError: not root, or `ip` or `tc` is missing.
    """
    if os.geteuid() != 0:
        raise InputError("this benchmark makes network namespaces and shaped links, which needs root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise InputError(f"this benchmark needs the programs ip and tc (package iproute2); {program} is missing")


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
            _run("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(_run, "ip", "link", "del", bridge)
            _run("ip", "address", "add", f"{self.address}/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
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
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        _run("ip", "link", "set", outer, "master", bridge, "up")
        inside = self.inside(host)
        _run(*inside, "ip", "address", "add", f"{_NETWORK}.{host + 1}/24", "dev", inner)
        _run(*inside, "ip", "link", "set", inner, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        shape = ("root", "tbf", "rate", self.rate, "burst", str(_BURST_BYTES), "latency", _QUEUE_LATENCY)
        _run("tc", "qdisc", "add", "dev", outer, *shape)
        _run(*inside, "tc", "qdisc", "add", "dev", inner, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"`{' '.join(command)}` failed: {message[-1] if message else done.returncode}")
