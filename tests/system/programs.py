"""`python -m trainer` as a user runs it, and as a process forked from one that has torch imported already.

    run_program(args), Program(args)                   a fresh interpreter: everything, warnings of imports included
    run_forked(args, folder), Program(args, forked=…)  the same `main` in a process forked from a server that imported
                                                       torchrec once: 20 times faster

Every process started here, and all its descendants, carry a mark in their environment, by which orphans are found.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagpipe.util import failpoints as crash_points

__all__ = [
    "CONTEXT",
    "ROOT",
    "Done",
    "Program",
    "await_end",
    "await_gone",
    "marked_processes",
    "run_forked",
    "run_program",
]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0
_MARK = "BAGPIPE_TEST_MARK"
CONTEXT = multiprocessing.get_context("forkserver")
# Imported by the fork server, once.
CONTEXT.set_forkserver_preload(["tests.system.preloaded"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished process."""

    code: int
    out: str
    err: str
    mark: str

    @property
    def error_line(self) -> str:
        """The one line on stderr; AssertionError if there are more, or none."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"expected one line on stderr, got {len(lines)}:\n{self.err}"
        return lines[0]


class Forked:
    """The trainer's `main` in a process forked from the server: as much of `subprocess.Popen` as `Program` needs."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], streams: Path) -> None:
        self._streams = streams.with_suffix(".out"), streams.with_suffix(".err")
        for path in self._streams:
            path.touch()
        self._process = CONTEXT.Process(target=_main, args=(list(arguments), *self._streams, dict(environment)))
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
            raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
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


@dataclass(slots=True)
class Program:
    """`PREFIX python -m MODULE ARGUMENTS` running. Use as a context manager: it is killed on the way out.

    Attributes:
        forked: folder for the streams of a process that is forked from the server, the trainer without a prefix only;
            None: a fresh interpreter.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "trainer"
    prefix: Sequence[str] = ()
    forked: Path | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | Forked | None = None

    def __enter__(self) -> Program:
        if self.forked is not None:
            assert self.module == "trainer"
            assert not self.prefix
            marked = {**self.environment, _MARK: self.mark}
            self.process = Forked(self.arguments, marked, self.forked / self.mark)
            return self
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", self.module, *self.arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment, _MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as in a terminal: Ctrl-C is sent to the group
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def interrupt_group(self) -> None:
        """Ctrl-C in a terminal."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self) -> Done:
        """Wait for the end."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        code = self.process.returncode
        assert code is not None
        return Done(code=code, out=out, err=err, mark=self.mark)


def run_program(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, module: str = "trainer"
) -> Done:
    """Run to the end in a fresh interpreter."""
    with Program(arguments, environment or {}, module) as program:
        return program.finish()


def run_forked(arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Done:
    """Run to the end in a process forked from the server; its output goes through files in `folder`."""
    with Program(arguments, environment or {}, forked=folder) as program:
        return program.finish()


def _main(arguments: list[str], out: Path, err: Path, environment: Mapping[str, str]) -> None:
    """The forked process: the program's own main, with its own session and standard streams."""
    os.setsid()
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.update(environment)
    # It reads the environment when it is imported, which was in the fork server.
    importlib.reload(crash_points)
    os.chdir(ROOT)
    sys.argv = ["trainer", *arguments]
    from trainer.cli import main

    main()


def marked_processes(mark: str) -> dict[int, str]:
    """Processes that carry the mark and are no zombies: command lines by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # gone in the meantime, or not ours to look at
            continue
    return found


def await_end(pids: Iterable[int], timeout_s: float = 20.0) -> None:
    """Wait until the processes have ended; AssertionError naming one that does not."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            readable, _, _ = select.select([descriptor], [], [], timeout_s)
            assert readable, f"still there after {timeout_s:g} s: process {pid}"
        finally:
            os.close(descriptor)


def await_gone(mark: str, timeout_s: float = 20.0) -> None:
    """Wait until no process carries the mark; AssertionError naming those that will not go."""
    await_end(marked_processes(mark), timeout_s)
    left = marked_processes(mark)
    assert not left, f"started meanwhile: {left}"
