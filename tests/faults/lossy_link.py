"""Two network namespaces joined by a link that delays and loses packets, and drops all of them on command.

    namespace near, 10.78.0.1 ── tun ── a process that holds packets back or drops them ── tun ── far, 10.78.0.2

Uses TUN devices because many machines lack the kernel's network emulator. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import select
import signal
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.system.hosts import Host, run_ip, why_no_hosts

__all__ = ["LossyLink", "lossy_link", "why_no_link"]

_CONTEXT = multiprocessing.get_context("forkserver")
_DEADLINE_S = 30.0
_CLONE_NEWNET = 0x40000000
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF, IFF_TUN | IFF_NO_PI
_PACKET_BYTES = 1 << 16
_NAMES = ("near", "far")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Delay and loss of each direction."""

    delay_s: float
    jitter_s: float
    loss: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyLink:
    """The link and the hosts at its ends."""

    near: Host
    far: Host
    pipe: Connection = field(repr=False)

    def drop_all(self) -> None:
        """Drop every packet from now on, without closing any connection."""
        self.pipe.send("drop_all")
        assert self.pipe.poll(_DEADLINE_S)
        self.pipe.recv()


def why_no_link() -> str:
    """Why this machine cannot create the link; empty if it can."""
    if reason := why_no_hosts():
        return reason
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun"


@contextmanager
def lossy_link(
    *, delay_s: float = 0.005, jitter_s: float = 0.002, loss: float = 0.01, seed: int = 1
) -> Iterator[LossyLink]:
    """Create the link. The caller ends the programs at its ends."""
    run = uuid.uuid4().hex[:8]
    hosts = [
        Host(name=name, namespace=f"bagpipe-{run}-{name}", address=f"10.78.0.{number}")
        for number, name in enumerate(_NAMES, start=1)
    ]
    with ExitStack() as stack:
        for host in hosts:
            run_ip("netns", "add", host.namespace)
            stack.callback(run_ip, "netns", "del", host.namespace)
            run_ip("-n", host.namespace, "tuntap", "add", "dev", "cable", "mode", "tun")
            run_ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run_ip("-n", host.namespace, "link", "set", device, "up")
        pipe, theirs = _CONTEXT.Pipe()
        quality = Quality(delay_s=delay_s, jitter_s=jitter_s, loss=loss, seed=seed)
        process = _CONTEXT.Process(target=_carry, args=(theirs, [host.namespace for host in hosts], quality))
        process.start()
        stack.callback(process.join, _DEADLINE_S)
        theirs.close()
        stack.callback(pipe.close)
        assert pipe.poll(_DEADLINE_S), "the link was not created"
        pipe.recv()
        yield LossyLink(near=hosts[0], far=hosts[1], pipe=pipe)


def _carry(pipe: Connection, namespaces: list[str], quality: Quality) -> None:
    """The process that forwards packets between the devices. Ends when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends = [_open_tun(namespace) for namespace in namespaces]
    chance = random.Random(quality.seed)
    due: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    drops_all = False
    pipe.send("done")
    while True:
        now_s = time.monotonic()
        while due and due[0][0] <= now_s:
            _, _, sink, packet = heapq.heappop(due)
            os.write(sink, packet)
        wait_s = due[0][0] - now_s if due else None
        for ready in select.select([pipe, *ends], [], [], wait_s)[0]:
            if ready is pipe:
                try:
                    pipe.recv()
                except EOFError:
                    return
                drops_all = True
                pipe.send("done")
                continue
            packet = os.read(ready, _PACKET_BYTES)
            if drops_all or chance.random() < quality.loss:
                continue
            sink = ends[1 - ends.index(ready)]
            at_s = time.monotonic() + quality.delay_s + chance.random() * quality.jitter_s
            heapq.heappush(due, (at_s, next(numbers), sink, packet))


def _open_tun(namespace: str) -> int:
    """Open the device in another namespace. Moves the calling thread there for good."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", b"cable", _TUN_WITHOUT_HEADER))
    return descriptor
