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
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagpipe.util import failpoints
from tests.system.forked_child import ForkedChild, fork_cachers
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


def _trainer(arguments: list[str]) -> None:
    from trainer.cli import main

    main(arguments)


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    # `args` is the worker's command line: python -u -m trainer ARGUMENTS.
    def fork(self: object, args: Sequence[str], env: Mapping[str, str]) -> ForkedChild:
        return ForkedChild(lambda: _trainer(list(args[args.index("trainer") + 1 :])), env, has_own_session=True)

    SubprocessHandler._popen = fork
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
    fork_cachers()
    _PROGRAMS[module](arguments)


def _write_mark(mark: str) -> None:
    """Write the mark into the memory behind /proc/PID/environ; `os.environ` would write elsewhere."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    blank = getenv(MARK.encode())
    assert blank, "the server was started before this module was imported"
    ctypes.memmove(blank, mark.encode(), len(mark))
