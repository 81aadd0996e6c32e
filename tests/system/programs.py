"""`python -m trainer` and `torchrun` as subprocesses, or forked from a server that has imported torch.

    run_program(args), Program(args), torchrun(args)    fresh interpreters: everything, import warnings included
    run_forked(args, folder), Program(args, forked=…),  the same `main` in forked processes (see `forked`), several
    torchrun(args, forked=…)                            seconds of processor time less for each

Every process started here and all its descendants carry a mark in their environment, which identifies orphans.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.forked import MARK, ROOT, Forked
from tests.system.hosts import Host

__all__ = [
    "ROOT",
    "Done",
    "Program",
    "await_end",
    "await_gone",
    "marked_processes",
    "ranks_of",
    "run_forked",
    "run_program",
    "torchrun",
    "without_advice",
]

TIMEOUT_S = 250.0


def without_advice(err: str) -> str:
    """Text of stderr without the line about a store server of this machine whose scripting lacks the fixes of 2025."""
    return re.sub(r"^warning: store \S+ runs (redis|valkey) [\d.]+: .* can break into it .*\n", "", err, flags=re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished process."""

    code: int
    out: str
    err: str
    mark: str

    @property
    def error_line(self) -> str:
        """The only line on stderr. AssertionError if there is not exactly one."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"expected one line on stderr, got {len(lines)}:\n{self.err}"
        return lines[0]


@dataclass(slots=True)
class Program:
    """A running `PREFIX python -m MODULE ARGUMENTS`. Context manager: kills the process on exit.

    Attributes:
        module: ``trainer`` or ``torch.distributed.run``.
        prefix: command-line prefix of a fresh interpreter.
        host: where it runs; None: here.
        forked: folder for the streams of a process forked from the server; None: a fresh interpreter.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "trainer"
    prefix: Sequence[str] = ()
    host: Host | None = None
    forked: Path | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | Forked | None = None

    def __enter__(self) -> Program:
        if self.forked is not None:
            assert not self.prefix
            marked, streams = {**self.environment, MARK: self.mark}, self.forked / uuid.uuid4().hex
            self.process = Forked(self.module, self.arguments, marked, streams, self.host)
            return self
        there = [] if self.host is None else self.host.prefix
        self.process = subprocess.Popen(
            [*self.prefix, *there, sys.executable, "-m", self.module, *self.arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a new process group, as in a terminal: Ctrl-C is sent to the group
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
        """Send SIGINT to the process group, as Ctrl-C in a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self) -> Done:
        """Wait for the process to end."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        code = self.process.returncode
        assert code is not None
        return Done(code=code, out=out, err=without_advice(err), mark=self.mark)


def run_program(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, module: str = "trainer"
) -> Done:
    """Run a fresh interpreter to its end."""
    with Program(arguments, environment or {}, module) as program:
        return program.finish()


def run_forked(arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Done:
    """Run a process forked from the server to its end; its output goes through files in `folder`."""
    with Program(arguments, environment or {}, forked=folder) as program:
        return program.finish()


def torchrun(arguments: Sequence[str], *options: str, ranks: int = 2, forked: Path | None = None) -> Program:
    """``torchrun --nproc-per-node=RANKS OPTIONS -m trainer ARGUMENTS``; see `Program.forked`."""
    launcher = [f"--nproc-per-node={ranks}", *options, "-m", "trainer"]
    return Program([*launcher, *arguments], module="torch.distributed.run", forked=forked)


def marked_processes(mark: str) -> dict[int, str]:
    """Command lines and names by process id of processes that carry the mark, except zombies."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ") + (folder / "comm").read_bytes()
                found[int(folder.name)] = words.decode()
        except OSError:  # gone meanwhile, or not readable by us
            continue
    return found


def ranks_of(program: Program) -> list[int]:
    """Process ids of torchrun's workers, in no order."""
    return [pid for pid in marked_processes(program.mark) if _parent(pid) == program.pid]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_end(pids: Iterable[int], timeout_s: float = 60.0) -> None:
    """Wait until the processes have ended. AssertionError names one that has not."""
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


def await_gone(mark: str, timeout_s: float = 60.0) -> None:
    """Wait until no process carries the mark. AssertionError names those that remain."""
    await_end(marked_processes(mark), timeout_s)
    left = marked_processes(mark)
    assert not left, f"started meanwhile: {left}"
