"""A store server behind a shaped link: a network namespace, a veth pair, a token bucket filter on both ends.

    this process ── veth (tbf 1 Gbit/s) ═══ (tbf 1 Gbit/s) veth ── server       198.18.0.1 ─ 198.18.0.2 (RFC 2544)
                 └─────────────── unix socket: unshaped, to fill the store ──┘

One `with` creates and removes everything; removing a namespace removes its interfaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer, find_server

__all__ = ["ShapedServer", "check_privileges", "run_command"]

_HOST_ADDRESS, _SERVER_ADDRESS = "198.18.0.1", "198.18.0.2"
_PORT = 6379
#: Burst of the token bucket. A segment offloaded by TCP is up to 64 KiB, which a smaller bucket would split.
_BURST_BYTES = 256 * 1024
#: Longest stay in the queue before packets are dropped: 6 MB at 1 Gbit/s, about the buffer of a switch port.
_QUEUE_LATENCY = "50ms"
_OUR_INTERFACE = f"bp{os.getpid() % 100_000}a"
_SERVER_INTERFACE = f"bp{os.getpid() % 100_000}b"


def check_privileges() -> None:
    """Check that a namespace and a link can be made.

    Raises:
        InputError: not root, or `ip` or `tc` is missing.
    """
    if os.geteuid() != 0:
        raise InputError("this benchmark makes network namespaces and shaped links, which needs root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise InputError(
                f"this benchmark needs the programs ip and tc (package iproute2); {program} is not on PATH"
            )


class ShapedServer:
    """A Redis-protocol server behind the shaped link; a unix socket bypasses the link to fill the store.

    Args:
        rate: of the link in each direction, as `tc` writes it.

    Attributes:
        url: through the link.
        direct_url: past the link.
        interface: name of our end.

    Raises:
        InputError: on `__enter__`: a command failed, or there is no server binary.
    """

    def __init__(self, rate: str = "1gbit") -> None:
        self.rate = rate
        self.url = f"redis://{_SERVER_ADDRESS}:{_PORT}"
        self.direct_url = ""
        self.interface = _OUR_INTERFACE
        self._namespace = f"bagpipe-overlap-{os.getpid()}"
        self._stack: ExitStack | None = None
        self._server: EmbeddedServer | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._lay_link(stack)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-overlap-")))
            self._server = stack.enter_context(EmbeddedServer(folder, binary=self._wrapper(folder)))
            self.direct_url = self._server.url
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @property
    def process_id(self) -> int:
        """Process id of the server."""
        assert self._server is not None, "the server is not running"
        return self._server.process_id

    def link_bytes(self) -> tuple[int, int]:
        """Bytes received and sent on our end since the link was laid, headers included."""
        folder = Path("/sys/class/net") / _OUR_INTERFACE / "statistics"
        received, sent = (int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
        return received, sent

    def _lay_link(self, stack: ExitStack) -> None:
        name = self._namespace
        run_command("ip", "netns", "add", name)
        stack.callback(run_command, "ip", "netns", "del", name)
        inside = ("ip", "netns", "exec", name)
        run_command(
            "ip", "link", "add", _OUR_INTERFACE, "type", "veth", "peer", "name", _SERVER_INTERFACE, "netns", name
        )
        # Before the namespace: its own end of the link is removed some time after it, and the next link has its name.
        stack.callback(run_command, "ip", "link", "del", _OUR_INTERFACE)
        run_command("ip", "address", "add", f"{_HOST_ADDRESS}/30", "dev", _OUR_INTERFACE)
        run_command("ip", "link", "set", _OUR_INTERFACE, "up")
        run_command(*inside, "ip", "address", "add", f"{_SERVER_ADDRESS}/30", "dev", _SERVER_INTERFACE)
        run_command(*inside, "ip", "link", "set", _SERVER_INTERFACE, "up")
        shape = ("root", "tbf", "rate", self.rate, "burst", str(_BURST_BYTES), "latency", _QUEUE_LATENCY)
        run_command("tc", "qdisc", "add", "dev", _OUR_INTERFACE, *shape)
        run_command(*inside, "tc", "qdisc", "add", "dev", _SERVER_INTERFACE, *shape)

    def _wrapper(self, folder: Path) -> Path:
        """A script that starts the server in the namespace, with a port. Of repeated options the last one counts."""
        script = folder / "server-in-namespace"
        options = f"--bind {_SERVER_ADDRESS} --port {_PORT} --protected-mode no"
        script.write_text(f'#!/bin/sh\nexec ip netns exec {self._namespace} {find_server()} "$@" {options}\n')
        script.chmod(0o700)
        return script


def run_command(*command: str) -> None:
    """Run a command. Raises InputError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"`{' '.join(command)}` failed: {message[-1] if message else done.returncode}")
