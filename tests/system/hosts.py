"""Two hosts on one machine: network and UTS namespaces, joined by a rate-limited veth pair.

    namespace node-a, 10.77.0.1 ── veth, tbf ── node-b, 10.77.0.2        names in /etc/netns/<namespace>/hosts

Needs root and iproute2. Programs started on a host see its name and its network; files are shared.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from bagpipe.store.server.embedded import find_server

__all__ = ["Host", "HostStore", "run_ip", "serve_store", "two_hosts", "why_no_hosts"]

_NAMES = ("node-a", "node-b")
_RATE = "400mbit"
#: From linux/sched.h and linux/mount.h.
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A simulated host.

    Attributes:
        name: host name.
        namespace: network namespace.
        address: IPv4 address.
    """

    name: str
    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Command-line prefix that runs a program on this host. Each command execs the next."""
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*there, "sh", "-c", 'hostname "$0"; exec "$@"', self.name]

    def enter(self) -> None:
        """Move this single-threaded process to the host, as `prefix` does."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}", "rb") as network:
            _succeed(libc.setns(network.fileno(), _CLONE_NEWNET), "setns")
        _succeed(libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS), "unshare")
        socket.sethostname(self.name)
        names = Path("/etc/netns", self.namespace, "hosts")
        if names.exists():
            _succeed(libc.mount(b"", b"/", None, _MS_SLAVE | _MS_REC, None), "mount /")
            _succeed(libc.mount(str(names).encode(), b"/etc/hosts", None, _MS_BIND, None), "mount /etc/hosts")

    def cut_link(self) -> None:
        """Stop all traffic on the link without closing any connection."""
        run_ip("-n", self.namespace, "link", "set", "cable", "down")


def why_no_hosts() -> str:
    """Why this machine cannot create hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"bagpipe-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"ip netns: {done.stderr.strip()}"
    run_ip("netns", "del", name)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts. The caller ends all processes that run on them."""
    run = uuid.uuid4().hex[:8]
    hosts = [
        Host(name=name, namespace=f"bagpipe-{run}-{name}", address=f"10.77.0.{number}")
        for number, name in enumerate(_NAMES, start=1)
    ]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    with ExitStack() as stack:
        for host in hosts:
            folder = Path("/etc/netns") / host.namespace
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(names)
            run_ip("netns", "add", host.namespace)
            stack.callback(run_ip, "netns", "del", host.namespace)
        first, second = hosts
        peer = ["peer", "name", "cable", "netns", second.namespace]
        run_ip("link", "add", "cable", "netns", first.namespace, "type", "veth", *peer)
        for host in hosts:
            run_ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run_ip("-n", host.namespace, "link", "set", device, "up")
            shape = ["qdisc", "add", "dev", "cable", "root", "tbf", "rate", _RATE, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", host.namespace, *shape], check=True)
        yield first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStore:
    """A store server on a host: its URL for both hosts, and a unix socket that the test can reach from neither."""

    url: str
    local_url: str


@contextmanager
def serve_store(host: Host, folder: Path, port: int = 6379) -> Iterator[HostStore]:
    """A store server on a host that publishes every write."""
    options = [
        "--port",
        str(port),
        "--bind",
        host.address,
        "--protected-mode",
        "no",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    options += ["--notify-keyspace-events", "Kh"]
    local = folder / "server.sock"
    command = [*host.prefix, str(find_server()), *options, "--unixsocket", str(local)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            _await_server(local, server)
            yield HostStore(url=f"redis://{host.address}:{port}", local_url=f"unix://{local}")
        finally:
            server.terminate()


def _await_server(path: Path, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            with redis.Redis(unix_socket_path=str(path)) as client:
                client.ping()
                return
        except redis.ConnectionError:
            try:
                server.wait(0.02)  # also the delay between two attempts
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError("the store server ended") from None
    raise AssertionError("the store server does not answer")


def _succeed(code: int, what: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), what)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
