"""Programs in processes forked from a server that has imported torch and torchrec: `main` without the import time.

    test ──> fork server ──fork──> trainer                          tests.system.preloaded: the imported modules
                         └─fork──> torchrun ──fork──> rank, rank    as torchrun's own Popen: session, group, pid

A forked process has its own session, standard streams and environment, and exits as an interpreter does. Its /proc
entry shows the command line and the environment of the server; the mark is written over the server's.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import NoReturn

from bagpipe.util import failpoints
from tests.system.hosts import Host

__all__ = ["CONTEXT", "MARK", "ROOT", "Forked"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.system.preloaded"])

#: Environment variable of the mark, 32 characters. The server's blank value is the placeholder for forked processes.
MARK = "BAGPIPE_TEST_MARK"
os.environ.setdefault(MARK, "-" * 32)
ROOT = Path(__file__).parents[2]


class Forked:
    """A program's `main` in a process forked from the server. Implements the part of `subprocess.Popen` that `Program`
    uses.

    Args:
        module: ``trainer`` or ``torch.distributed.run``, whose workers are trainers.
        arguments: of its command line.
        environment: changes to the server's, including the mark.
        streams: path of its standard stream files, without suffix.
        host: where it runs.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Path,
        host: Host | None = None,
    ) -> None:
        self._streams = streams.with_suffix(".out"), streams.with_suffix(".err")
        for path in self._streams:
            path.touch()
        program = module, list(arguments), dict(environment)
        self._process = CONTEXT.Process(target=_start, args=(*program, *self._streams, host))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._streams)
        return out, err


class _Rank:
    """A worker of torchrun, forked from the launcher. Implements the part of `subprocess.Popen` that torchrun uses.

    As with Popen, it is a child of the launcher in its own session and inherits none of the launcher's open files.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        begun, end = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _rank(arguments, environment)
        os.close(end)
        os.read(begun, 1)  # returns when the worker has closed its inherited files; its session exists by then
        os.close(begun)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode


def _trainer(arguments: list[str]) -> None:
    from trainer.cli import main

    main(arguments)


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    # `args` is the worker's command line: python -u -m trainer ARGUMENTS.
    SubprocessHandler._popen = lambda self, args, env: _Rank(args[args.index("trainer") + 1 :], env)
    sys.argv = ["torchrun", *arguments]
    run.main()


_PROGRAMS = {"trainer": _trainer, "torch.distributed.run": _torchrun}


def _start(
    module: str, arguments: list[str], environment: Mapping[str, str], out: Path, err: Path, host: Host | None
) -> None:
    """Start the process that the server forked; `multiprocessing` ends it."""
    os.setsid()
    for path, stream in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    _write_mark(environment[MARK])
    if host is not None:
        host.enter()
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    importlib.reload(failpoints)  # it read the fork server's environment when it was imported
    os.chdir(ROOT)
    _PROGRAMS[module](arguments)


def _write_mark(mark: str) -> None:
    """Write the mark into the memory behind /proc/PID/environ; `os.environ` would write elsewhere."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    blank = getenv(MARK.encode())
    assert blank, "the server was started before this module was imported"
    ctypes.memmove(blank, mark.encode(), len(mark))


def _rank(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a rank in a process forked from the launcher; none of the launcher's exit code runs in it."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        resource_tracker._resource_tracker._fd = None  # closed; the rank starts its own if needed
        os.environ.clear()
        os.environ.update(environment)
        importlib.reload(failpoints)
        _trainer(list(arguments))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        util._exit_function()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
