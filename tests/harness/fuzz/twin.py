"""`TwinRun`: the starts of one twin, until it ends by itself.

start ranks, armed ─> all ended ─┬─ killed or interrupted as drawn ─> start again
                                 └─ by itself ─> Outcome: exit code, error lines, result
"""

from __future__ import annotations

import json
import re
import select
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagpipe.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED, JobError
from tests.harness.chaos.hosts import DaemonHost
from tests.harness.fuzz.draw import Draw, Kill, Places, Twin, settings_of
from tests.harness.fuzz.site import Site
from tests.harness.zygote import Started, Zygote

__all__ = ["START_TIMEOUT_S", "Outcome", "TwinRun"]

START_TIMEOUT_S = 150.0
#: Times as long for a job whose dense part is compiled.
_COMPILED = 6
_ABORT_TIMEOUT_S = 10.0
#: Lines that a program may print on standard error, beside its error.
_EXPECTED_LINE = re.compile(r"(note|warning): |step \d+: |interrupted$|  ")
#: Which rank reports first, and which of several bad gradients it names, depends on the machine's scheduling.
_RANK = re.compile(r"(?<=^error: )rank \d+: ")
_NOT_FINITE = re.compile(r"^error: batch (\d+)( of rank \d+)?: .* not finite;.*")
#: Exceptions of the models themselves, which end a job with a traceback: a batch norm of one example.
_ERROR_OF_A_MODEL = re.compile(r"ValueError: Expected more than 1 value per channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a twin.

    Attributes:
        code: exit code of its last start; that of the rank with the highest.
        lines: different error lines of the ranks with that code, sorted, without paths and ranks.
        result: of a job that is done.
        commands: of all starts.
        num_kills: ends at failpoints.
        problem: a defect seen without comparing; empty if none.
    """

    code: int = EXIT_DONE
    lines: tuple[str, ...] = ()
    result: Mapping[str, Any] | None = None
    commands: tuple[str, ...] = ()
    num_kills: int = 0
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class TwinRun:
    """One run of one twin.

    Args:
        draw, twin: what is run.
        site: where.
        folder: of this twin's files; exists.
        data: values of the log's keys.
        cache_rows: of each rank.
        start_from: the checkpoints of the job before.
    """

    draw: Draw
    twin: Twin
    site: Site
    folder: Path
    data: Mapping[str, str]
    cache_rows: int
    start_from: str = ""
    _commands: list[str] = field(default_factory=list)
    _num_kills: int = 0

    def go(self) -> Outcome:
        """Run to the end."""
        daemon = DaemonHost(self.site.zygote, [], self.folder)
        places = Places(
            folder=str(self.folder),
            data=self.data,
            store_urls=self.site.store_urls,
            namespace=f"{self.folder.parent.name}-{self.twin.name}",
            cacher_url=daemon.url,
            cache_rows=self.cache_rows,
            start_from=self.start_from,
        )
        settings = settings_of(self.draw, self.twin, places)
        arguments = [f"--{path}={value}" for path, value in settings.items() if value]
        if self.twin.cacher != "daemon":
            return self._all_starts(arguments)
        theirs = [argument for argument in arguments if not argument.startswith("--cacher.url=")]
        try:
            with DaemonHost(self.site.zygote, theirs, self.folder):
                return self._all_starts(arguments)
        except JobError:
            said = (self.folder / "daemon.err").read_text().splitlines()
            refusals = [line for line in said if line.startswith("error: ")]
            if len(said) != 1 or not refusals:
                return Outcome(code=EXIT_FAILED, problem=f"the daemon did not start: {' | '.join(said[-3:])}")
            return Outcome(code=EXIT_INPUT, lines=tuple(map(self._without_paths, refusals)))

    def _all_starts(self, arguments: Sequence[str]) -> Outcome:
        for kill in self.twin.kills:
            outcome = self._start(arguments, kill)
            if outcome is not None:
                break
        else:
            outcome = self._start(arguments, None)
        assert outcome is not None, "a start without a kill ends by itself"
        if self.twin.again and not outcome.problem and outcome.code == EXIT_DONE:
            outcome = self._start(arguments, None)
            assert outcome is not None, "a start without a kill ends by itself"
        return outcome

    def _start(self, arguments: Sequence[str], kill: Kill | None) -> Outcome | None:
        """One start. None if it ended at its failpoint, as it should."""
        number = len(self._commands)
        result = self.folder / f"result-{number}.json"
        arguments = [*arguments, "--result", str(result)]
        self._commands.append(_shell(arguments, self.draw.world_size, kill))
        zygote, world_size = self.site.zygote, self.draw.world_size
        environments = _environments(world_size, kill)
        ranks = [
            zygote.start("trainer.cli", arguments, streams=self.folder / f"start-{number}-rank-{rank}", environment=env)
            for rank, env in enumerate(environments)
        ]
        try:
            is_compiled = ("run.compile", "true") in self.draw.job
            problem, killed = _wait(ranks, kill, zygote, START_TIMEOUT_S * (_COMPILED if is_compiled else 1))
        finally:
            for rank in ranks:
                rank.signal(signal.SIGKILL)
                zygote.reap(rank)
        has_died = kill is not None and not problem and ranks[kill.rank].code == -signal.SIGKILL
        killed |= {kill.rank} if kill is not None and has_died else set()
        problem = problem or self._defect(ranks, killed)
        was_interrupted = kill is not None and any(rank.code == EXIT_INTERRUPTED for rank in ranks)
        self._num_kills += has_died or was_interrupted
        if not problem and (has_died or was_interrupted):
            return None
        code = max((rank.code or 0 for rank in ranks), default=EXIT_DONE)
        found = None
        if code == EXIT_DONE and not problem:
            if result.exists():
                found = json.loads(result.read_text())
            else:
                problem = "all ranks ended well, without a result"
        return Outcome(
            code=code,
            lines=tuple(sorted({line for rank in ranks if rank.code == code for line in self._error_lines(rank)})),
            result=found,
            commands=tuple(self._commands),
            num_kills=self._num_kills,
            problem=f"start {number}: {problem}" if problem else "",
        )

    def _error_lines(self, rank: Started) -> list[str]:
        said = rank.error_lines()
        lines = [self._without_paths(_RANK.sub("", line)) for line in said if line.startswith("error: ")]
        lines = [_NOT_FINITE.sub(r"error: batch \1 is not finite", line) for line in lines]
        return lines + [line for line in said if _ERROR_OF_A_MODEL.match(line)]

    def _without_paths(self, line: str) -> str:
        return re.sub(re.escape(str(self.folder.parent)) + r"(/[a-z]+)?", "…", line)

    def _defect(self, ranks: Sequence[Started], killed: set[int]) -> str:
        """The first defect of the ranks' ends, such as a traceback; empty if there is none."""
        for number, rank in enumerate(ranks):
            lines = rank.error_lines()
            is_models = any(_ERROR_OF_A_MODEL.match(line) for line in lines)
            if any(line.startswith("Traceback") for line in lines) and not is_models:
                return f"rank {number} ended with a traceback: {lines[-1]}"
            if number in killed:
                continue
            errors = [line for line in lines if line.startswith("error: ")]
            # After a failure torch's own store may log that its peer is gone.
            others = [line for line in lines if rank.code == EXIT_DONE and not _EXPECTED_LINE.match(line)]
            if rank.code not in (0, 1, 2, EXIT_INTERRUPTED):
                return f"rank {number} ended with code {rank.code}: {' | '.join(lines[-3:])}"
            if len(errors) != (rank.code in (1, 2) and not is_models):
                return f"rank {number} ended with code {rank.code} and {len(errors)} errors: {' | '.join(lines[-3:])}"
            if others:
                return f"rank {number} printed {others[0]!r}"
        return ""


def _wait(ranks: Sequence[Started], kill: Kill | None, zygote: Zygote, timeout_s: float) -> tuple[str, set[int]]:
    """Wait until all ranks have ended. Returns the problem, and the ranks whose end is not judged: killed ones."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + timeout_s
    while running := {number for number, rank in enumerate(ranks) if not rank.has_ended()}:
        if time.monotonic() > deadline_s:
            for number in running:
                ranks[number].signal(signal.SIGABRT)  # prints the stacks
                ranks[number].has_ended(_ABORT_TIMEOUT_S)
            return f"not ended after {timeout_s:g} s", set(range(len(ranks)))
        select.select([ranks[number].pidfd for number in running], [], [], 1.0)
        if kill is None or killed or not ranks[kill.rank].has_ended():
            continue
        if zygote.reap(ranks[kill.rank]) == -signal.SIGKILL:
            killed.add(kill.rank)
            if kill.spreads:
                killed |= running - {kill.rank}
                for number in killed - {kill.rank}:
                    ranks[number].signal(signal.SIGKILL)
    return "", killed


def _environments(world_size: int, kill: Kill | None) -> list[dict[str, str]]:
    """Of each rank."""
    environments: list[dict[str, str]] = [{} for _ in range(world_size)]
    if world_size > 1:
        port = _free_port()
        for rank, environment in enumerate(environments):
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    if kill is not None:
        environments[kill.rank]["BAGPIPE_CRASH_AT"] = kill.crash_at
    return environments


def _shell(arguments: Sequence[str], world_size: int, kill: Kill | None) -> str:
    """The start as a line of shell. Under torchrun the failpoint is armed on every rank."""
    program = ["python", "-m", "trainer"] if world_size == 1 else ["torchrun", f"--nproc-per-node={world_size}"]
    if world_size > 1:
        program += ["-m", "trainer"]
    armed = f"BAGPIPE_CRASH_AT={kill.crash_at} " if kill is not None else ""
    return armed + shlex.join([*program, *arguments])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
