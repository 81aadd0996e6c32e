"""`Zygote`: an interpreter with the programs imported; it forks a process for each start of a program.

    runner ──{module, arguments, environment, …}──> zygote ──fork──> own session, own streams, module.main()
           <──pid──                                        pidfd: the runner sees the end
           ──{reap: pid}──> <──code──                      only the parent can reap the exit code

Importing torch and torchrec takes seconds, a fork milliseconds, so a test can kill and start a program hundreds of
times. A forked process runs the program's own `main` and exits as any interpreter does. It dies with the zygote.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import bagpipe
from bagpipe.errors import JobError
from tests.system.forked_child import fork_cachers

__all__ = ["Started", "Zygote", "serve"]

_MAX_MESSAGE_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1
_CRASH_POINTS = "bagpipe.util.failpoints"


@dataclass(slots=True, kw_only=True)
class Started:
    """A process forked by a zygote.

    Attributes:
        pid: of the process, and of its session and process group.
        pidfd: readable once the process has ended; closed by `reap`.
        out, err: files of its standard streams.
        code: exit code as in `subprocess` (-9: killed); None before `reap`.
    """

    pid: int
    pidfd: int
    out: Path
    err: Path
    code: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone. No-op if it has ended."""
        if self.code is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait up to so many seconds for its end."""
        return self.code is not None or bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def error_lines(self) -> list[str]:
        """Lines of its standard error."""
        return self.err.read_text(errors="replace").splitlines()


class Zygote:
    """Context manager. Threads can share one.

    Args:
        modules: slow imports, done before the first fork.
        folder: working directory of the processes, which contains the programs.
        environment: changes to the zygote's own environment, inherited by all processes.
    """

    def __init__(self, modules: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._modules = tuple(modules)
        self._folder = folder
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_asked = threading.Lock()

    def __enter__(self) -> Self:
        """Raises JobError if a module cannot be imported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {self._modules!r})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=self._folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), **self._environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self._socket = ours
        if not ours.recv(_MAX_MESSAGE_BYTES):
            self.__exit__()
            raise JobError(f"the zygote could not import {', '.join(self._modules)}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        streams: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """Fork a process that runs ``module.main()``.

        Args:
            module: imported before the fork, or when the process begins.
            arguments: of its command line.
            streams: standard output and error are appended to this path with .out and .err.
            environment: changes to its environment.
        """
        out, err = streams.with_name(streams.name + ".out"), streams.with_name(streams.name + ".err")
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment or {}),
            "out": str(out),
            "err": str(err),
        }
        pid = int(self._ask(request)["pid"])
        # The process may have ended already; its pid stays taken until it is reaped.
        return Started(pid=pid, pidfd=os.pidfd_open(pid), out=out, err=err)

    def reap(self, started: Started) -> int:
        """Wait for the end of a process. Returns its exit code."""
        if started.code is None:
            started.code = int(self._ask({"reap": started.pid})["code"])
            os.close(started.pidfd)
        return started.code

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "the zygote is not running"
        with self._is_asked:
            self._socket.send(json.dumps(request).encode())
            answer = self._socket.recv(_MAX_MESSAGE_BYTES)
        if not answer:
            raise JobError("the zygote has ended")
        return dict(json.loads(answer))


def _python_path() -> str:
    """Modules of the working directory come first; the library is found next to the programs."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(bagpipe.__file__).parents[1])])


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Main of the zygote: serves until the other end of the socket is closed. Never returns in forked processes."""
    with socket.socket(fileno=descriptor) as channel:
        for module in modules:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # else each collection in a forked process copies the pages of all modules
        channel.send(b"{}")
        zygote = os.getpid()
        while message := channel.recv(_MAX_MESSAGE_BYTES):
            request = json.loads(message)
            if "reap" in request:
                _, status = os.waitpid(request["reap"], 0)
                channel.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            pid = os.fork()
            if pid == 0:
                channel.close()
                _run(request, zygote)
            channel.send(json.dumps({"pid": pid}).encode())


def _run(request: Mapping[str, Any], zygote: int) -> NoReturn:
    """Main of a forked process. Ends by an exception through the interpreter's exit, as in any program."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        os._exit(1)
    for path, stream in ((request["out"], 1), (request["err"], 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(request["environment"])
    if _CRASH_POINTS in sys.modules:  # read once from the environment
        importlib.reload(sys.modules[_CRASH_POINTS])
    if "cacher.embedded" in sys.modules:
        fork_cachers()
    sys.argv = [request["module"], *request["arguments"]]
    main = importlib.import_module(request["module"]).main
    sys.exit(main(request["arguments"]) if inspect.signature(main).parameters else main())
