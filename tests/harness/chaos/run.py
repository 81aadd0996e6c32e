"""`Run`: one job, its faults, all the starts it needs, and the verdict.

start ranks ─> watch: progress reached? fire the armed fault; zombies due? wake them ─> all ended: judge each rank
   ^                                                                                          │
   └────────── heal: disks, network, servers <── a rank failed, as expected from faults <─────┴─ all well ─> compare
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.chaos.injector import Injector
from tests.harness.chaos.jobs import ChaosJob
from tests.harness.chaos.scene import Scene, Start, Zombies
from tests.harness.clock import ClockJump
from tests.harness.faults import Fault, FaultKind, FaultSchedule
from tests.harness.zygote import Zygote

__all__ = ["PRELOADED", "Reference", "Run", "Verdict", "draw_job", "make_reference"]

#: Imported by every start of the job.
PRELOADED = ("trainer.cli", "trainer.job", "torchrec", "cacher.cli", "bagpipe.store.redis.store")

#: Starts before a job counts as stuck: each fault can cost two, and a network fault takes time.
MAX_STARTS = 12
START_TIMEOUT_S = 60.0
#: Ranks that lose their launcher notice it immediately, or after `run.peer_timeout_s`.
LEFT_TIMEOUT_S = 180.0
_POLL_S = 0.01
#: Error of a job that finds rows without any checkpoint id, or without a schema record. The rows may belong to another
#: job. A person has to remove them, and so does the harness.
_ORPHANED = "use another store.namespace"
#: Fields of the result that must be equal.
COMPARED = ("dense_digest", "embedding_digest", "loss", "steps", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The uninterrupted job without checkpoints.

    Attributes:
        result: the trainer's result file.
        num_commands: commands that the store executed, the measure of progress.
    """

    result: Mapping[str, Any]
    num_commands: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a run.

    Attributes:
        seed: of the run.
        job: name of the job.
        faults: drawn faults, in words.
        num_fired: faults that fired.
        num_starts: of the job.
        seconds: wall time.
        errors: error lines of its starts, in order.
        problem: the defect found; empty if none.
        folder: files of a run with a problem.
    """

    seed: int
    job: str
    faults: tuple[str, ...]
    num_fired: int
    num_starts: int
    seconds: float
    errors: tuple[str, ...]
    problem: str
    folder: str = ""


def draw_job(seed: int, jobs: Sequence[ChaosJob]) -> ChaosJob:
    """The job of a run. Pure."""
    return random.Random(f"job {seed}").choices(jobs, weights=[job.weight for job in jobs])[0]


def make_reference(job: ChaosJob, zygote: Zygote) -> Reference:
    """Run the job without faults and without checkpoints.

    Raises:
        RuntimeError: the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="bagpipe-chaos-") as folder, Scene(job, zygote, Path(folder)) as scene:
        start = scene.start()
        start.has_ended(START_TIMEOUT_S)
        while not start.has_ended(1.0):
            pass
        scene.finish(start)
        problem, errors = judge(start)
        if problem or errors:
            raise RuntimeError(f"{job.name} without faults: {problem or errors}")
        return Reference(result=json.loads(start.result.read_text()), num_commands=scene.store.num_commands())


class Run:
    """One run.

    Args:
        seed: determines all draws.
        job: the job under test.
        kinds: of faults to draw from.
        zygote: forks the processes.
        reference: of the job.
        clock: can jump; None: clock faults do nothing.
    """

    def __init__(
        self,
        *,
        seed: int,
        job: ChaosJob,
        kinds: Sequence[FaultKind],
        zygote: Zygote,
        reference: Reference,
        clock: ClockJump | None = None,
    ) -> None:
        draw = random.Random(f"run {seed}")
        self._seed = seed
        self._job = job
        self._reference = reference
        self._every = draw.randint(7, 15)
        faults = FaultSchedule(
            seed=seed,
            kinds=kinds,
            world_size=job.world_size,
            num_batches=job.num_batches,
            num_checkpoints=job.num_batches // self._every,
        ).faults
        self._is_launched = any(fault.kind == "kill-agent" for fault in faults)
        if self._is_launched:  # torchrun hides its ranks, and would arm them again
            faults = tuple(fault for fault in faults if fault.kind not in ("kill-point", "zombie"))
        self._faults = faults
        self._pending = list(faults)
        self._num_fired = 0
        self._errors: list[str] = []
        self._starts = 0
        self._may_be_orphaned = any(fault.kind == "evict-rows" for fault in faults)
        needs = {kind.needs for kind in kinds if kind.name in {fault.kind for fault in faults}}
        # Stores are durable or not at random. Faults of the store's files need a durable one.
        about_files = any(fault.kind in ("rewind-store", "fill-store-disk") for fault in faults)
        self._folder = Path(tempfile.mkdtemp(prefix=f"bagpipe-chaos-{seed}-"))
        self._scene = Scene(
            job,
            zygote,
            self._folder,
            needs=frozenset(needs),
            durable=draw.random() < 0.6 or about_files,
            every=self._every,
            full_every=draw.randint(1, 4),
            clock=clock,
        )
        self._injector = Injector(self._scene)

    @property
    def folder(self) -> Path:
        """Folder of all files of the run; the caller removes it."""
        return self._folder

    def go(self) -> Verdict:
        """Run to the end."""
        start_s = time.monotonic()
        with self._scene:
            problem = self._until_it_ends() or self._bury() or self._look_back()
        words = [str(fault) for fault in self._faults] + [word for word in self._injector.words if word]
        return Verdict(
            seed=self._seed,
            job=self._job.name,
            faults=tuple(words),
            num_fired=self._num_fired,
            num_starts=self._starts,
            seconds=round(time.monotonic() - start_s, 2),
            errors=tuple(self._errors),
            problem=problem,
            folder=str(self._folder) if problem else "",
        )

    def _until_it_ends(self) -> str:
        while self._starts < MAX_STARTS:
            start = self._start()
            problem = self._watch(start)
            if any(zombies.start is start for zombies in self._scene.zombies):
                continue  # its successor starts while it sleeps
            self._scene.finish(start)
            self._note_crash(start)
            verdict, errors = judge_agent(start) if self._is_launched else judge(start)
            self._errors += errors
            problem = problem or verdict
            if problem:
                return f"start {start.number}: {problem}"
            if not errors and not start.killed:
                return self._compare(start)
            self._scene.heal()
            if self._may_be_orphaned and any(_ORPHANED in line for line in errors):
                self._scene.store.client.flushall()
        return f"no end after {MAX_STARTS} starts"

    def _start(self) -> Start:
        self._starts += 1
        armed = self._pending[0] if self._pending else Fault(kind="none")
        crash_at = f"{armed.point}:{armed.times}" if armed.point else ""
        return self._scene.start(crash_at, armed.rank)

    def _watch(self, start: Start) -> str:
        """Wait until all ranks have ended or are stopped. Returns the problem found."""
        scene = self._scene
        base = scene.store.num_commands()
        work = max((1 - scene.steps_kept() / self._job.num_batches) * self._reference.num_commands, 1.0)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not start.has_ended(_POLL_S if self._pending or scene.zombies else 1.0):
            if time.monotonic() > deadline_s:
                return f"not ended after {START_TIMEOUT_S:g} s"
            if not self._pending and not scene.zombies:
                continue
            progress = (scene.store.num_commands() - base) / work
            for zombies in [item for item in scene.zombies if item.wake_at <= progress]:
                if problem := self._wake(zombies):
                    return problem
            if self._pending and not self._pending[0].point and self._pending[0].at <= progress:
                fault = self._pending.pop(0)
                later = self._injector.fire(fault, start)
                if later is not None:
                    self._pending.insert(0, later)
                else:
                    self._num_fired += 1
                if fault.kind == "zombie":
                    return ""
        return ""

    def _note_crash(self, start: Start) -> None:
        """Count the armed fault as fired if a rank died at its failpoint."""
        if self._pending and self._pending[0].point:
            rank = self._pending[0].rank
            if start.ranks[rank].code == -signal.SIGKILL and rank not in start.killed:
                start.killed.add(rank)
                self._pending.pop(0)
                self._num_fired += 1

    def _wake(self, zombies: Zombies) -> str:
        """Resume a stopped start: it must find that it was replaced, or have nothing left to do."""
        self._scene.zombies.remove(zombies)
        zombies.start.signal(signal.SIGCONT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not zombies.start.has_ended(0.1):
            if time.monotonic() > deadline_s:
                return f"the woken start {zombies.start.number} does not end"
        self._scene.finish(zombies.start)
        problem, errors = judge(zombies.start)
        self._errors += [f"zombie: {line}" for line in errors]
        if problem:
            return f"the woken start {zombies.start.number}: {problem}"
        if not errors and not zombies.start.killed:
            return self._compare(zombies.start)
        return ""

    def _bury(self) -> str:
        """Wake all stopped starts; a job started afterwards must end the same."""
        if not self._scene.zombies:
            return ""
        for zombies in list(self._scene.zombies):
            if problem := self._wake(zombies):
                return problem
        self._pending.clear()
        return self._until_it_ends()

    def _look_back(self) -> str:
        """Check that no process of the job is left; ranks without a launcher or parent get time to notice."""
        deadline_s = time.monotonic() + LEFT_TIMEOUT_S
        while left := self._scene.workers():
            if time.monotonic() > deadline_s:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return f"processes of ranks {sorted(left.values())} are left"
            select.select([], [], [], 0.1)
        return ""

    def _compare(self, start: Start) -> str:
        """Differences from the reference."""
        try:
            found = json.loads(start.result.read_text())
        except OSError:
            return "all ranks ended well, without a result"
        differences = [
            f"{key} {found[key]} for {self._reference.result[key]}"
            for key in COMPARED
            if found[key] != self._reference.result[key]
        ]
        return "; ".join(differences)


def judge_agent(start: Start) -> tuple[str, list[str]]:
    """The problem with how a launcher ended. It reports for its ranks, in many lines."""
    (agent,) = start.ranks
    lines = sorted({line for line in agent.error_lines() if line.startswith("error: ")})
    if agent.code not in (0, 1) and not start.killed:
        return f"the launcher ended with code {agent.code}", lines
    return "", [] if agent.code == 0 else lines or ["error: (of the launcher)"]


def judge(start: Start) -> tuple[str, list[str]]:
    """The problem with how the ranks of a start ended, and the error lines of expected failures."""
    lines = []
    for rank, item in enumerate(start.ranks):
        said = item.error_lines()
        errors = [line for line in said if line.startswith("error: ")]
        lines += errors
        if any(line.startswith("Traceback") for line in said):
            return f"rank {rank} ended with a traceback: {said[-1]}", lines
        if item.code == 0 or rank in start.killed:
            continue
        if item.code not in (1, 2) or len(errors) != 1:
            return f"rank {rank} ended with code {item.code} and {' | '.join(said) or 'nothing'} on stderr", lines
    return "", lines
