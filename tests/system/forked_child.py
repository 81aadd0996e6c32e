"""`ForkedChild`: a child forked without an interpreter start, in place of a `Popen`; `fork_cachers` uses it.

    trainer (forked) ──EmbeddedCacher──> fork, give up the trainer's files ─> cacher.cli.main     milliseconds
                                         Popen python -m cacher, as users have it                most of a second

Fresh interpreters, as `run_program` starts them, keep `Popen`, and so do the tests of `EmbeddedCacher`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from bagpipe.util import failpoints

__all__ = ["ForkedChild", "fork_cachers"]

_PR_SET_NAME = 15


class ForkedChild:
    """A child of this process that runs `main` with an environment. Has the part of `Popen` that its callers use.

    As a `Popen`'s, it has default signal handlers and none of this process's open files.

    Args:
        main: returns the exit code. None of this process's exit code runs after it.
        environment: the whole environment.
        keep: descriptors that stay open.
        stdin: whether its standard input is a pipe from this process; otherwise it is inherited.
        has_own_session: else it has a process group of its own.
    """

    def __init__(
        self,
        main: Callable[[], object],
        environment: Mapping[str, str],
        *,
        keep: Sequence[int] = (),
        stdin: bool = False,
        has_own_session: bool = False,
    ) -> None:
        sys.stdout.flush()
        begun, end = os.pipe()
        given, self._stdin = os.pipe() if stdin else (0, 0)
        self.stdin: IO[bytes] | None = os.fdopen(self._stdin, "wb", 0) if stdin else None
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(main, environment, keep, given, has_own_session)
        os.close(end)
        if stdin:
            os.close(given)
        os.read(begun, 1)  # returns when the child has given up its inherited files; its session exists by then
        os.close(begun)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode


def _run(
    main: Callable[[], object], environment: Mapping[str, str], keep: Sequence[int], stdin: int, has_own_session: bool
) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # what the parent left must not be finalised here: its descriptors are other files now
        if has_own_session:
            os.setsid()
        else:
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if stdin:
            os.dup2(stdin, 0)
            sys.stdin = os.fdopen(0, closefd=False)
        _give_up_files({0, 1, 2, *keep})
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined] # closed; a new one starts if needed
        os.environ.clear()
        os.environ.update(environment)
        importlib.reload(failpoints)  # it read the environment when it was imported
        result = main()
        code = result if isinstance(result, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _give_up_files(keep: set[int]) -> None:
    """Close all descriptors but these, and leave /dev/null at their numbers.

    A library's handler for forks, such as that of Arrow, closes the numbers of its pipe in a child of this process too.
    They must not be those of other files by then.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - keep - {nowhere}:
        with suppress(OSError):  # that of the listing itself
            os.fstat(descriptor)
            os.dup2(nowhere, descriptor, inheritable=False)


def fork_cachers() -> None:
    """Let the embedded cachers of this process be forked from it, with its command line.

    One that starts while the process has a connection of gRPC is a fresh interpreter: gRPC's threads are not forked.
    """
    from cacher import embedded

    vars(embedded)["subprocess"] = SimpleNamespace(
        PIPE=subprocess.PIPE,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
        Popen=_forked_cacher,
    )


def _forked_cacher(
    command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **others: Any
) -> ForkedChild | subprocess.Popen[bytes]:
    threads = [(folder / "comm").read_text() for folder in Path("/proc/self/task").iterdir()]
    if any(name.startswith("grpc") for name in threads):
        return subprocess.Popen(command, pass_fds=pass_fds, env=env, **others)
    return ForkedChild(lambda: _cacher(command[command.index("cacher") + 1 :]), env, keep=pass_fds, stdin=True)


def _cacher(arguments: Sequence[str]) -> int:
    from cacher.cli import main

    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"-m cacher")  # tests tell processes apart by what they run
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return main(arguments)
