"""`Scene`: the processes, servers and disks of one chaos run, and the operations on them."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.harness.chaos.hosts import DaemonHost, StoreHost
from tests.harness.chaos.jobs import SCHEMA, ChaosJob
from tests.harness.clock import ClockJump
from tests.harness.disk import SmallDisk
from tests.harness.proxy import FaultyProxy
from tests.harness.zygote import Started, Zygote

__all__ = ["Scene", "Start", "Zombies"]

#: Environment variable of all processes of the job: the run's folder.
MARK = "BAGPIPE_CHAOS_RUN"

_MAX_RESTARTS = 3

#: Disk size for the checkpoints and the store's files of these jobs: several times what they need.
_DISK_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True)
class Start:
    """One start of the job.

    Attributes:
        number: from 0.
        ranks: its processes.
        result: rank 0's result file.
        killed: ranks that the harness killed or stopped for good; their exit codes are not judged.
    """

    number: int
    ranks: list[Started]
    result: Path
    killed: set[int] = field(default_factory=set)

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to these ranks; None: to all."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            if number is signal.SIGKILL:
                self.killed.add(rank)
            self.ranks[rank].signal(number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait up to so many seconds for the end of any rank. True once all have ended."""
        running = [rank.pidfd for rank in self.ranks if not rank.has_ended()]
        if running:
            select.select(running, [], [], timeout_s)
        return all(rank.has_ended() for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zombies:
    """A stopped and replaced start that resumes when its successor has done a share of its work."""

    start: Start
    wake_at: float


@dataclass(slots=True)
class Scene:
    """Context manager.

    Args:
        job: the job under test.
        zygote: forks the job's processes.
        folder: of this run alone.
        needs: parts required by the faults: "proxy", "disk", "store-disk", "agent".
        durable: the store keeps its data when it is killed.
        every, full_every: checkpoint intervals; 0: no checkpoints.
        clock: of all processes; None if it cannot jump.
    """

    job: ChaosJob
    zygote: Zygote
    folder: Path
    needs: frozenset[str] = frozenset()
    durable: bool = True
    every: int = 0
    full_every: int = 1
    clock: ClockJump | None = None
    disk: SmallDisk | None = None
    store_disk: SmallDisk | None = None
    proxy: FaultyProxy | None = None
    store: StoreHost = field(init=False)
    daemon: DaemonHost = field(init=False)
    zombies: list[Zombies] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _num_starts: int = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the job's checkpoints."""
        return self.folder / "checkpoints" / "job"

    def __enter__(self) -> Self:
        schema = self.folder / "schema.toml"
        schema.write_text(SCHEMA)
        data, store = self.folder / "store-data", self.folder / "store"
        for folder in (self.checkpoints.parent, data, store):
            folder.mkdir()
        with self._stack as stack:
            if "disk" in self.needs:
                self.disk = stack.enter_context(SmallDisk(self.checkpoints.parent, num_bytes=_DISK_BYTES))
            if "store-disk" in self.needs:
                self.store_disk = stack.enter_context(SmallDisk(data, num_bytes=_DISK_BYTES))
            self.store = stack.enter_context(StoreHost(store, durable=self.durable, data=data))
            if "proxy" in self.needs:
                path = self.folder / "proxy.sock"
                self.proxy = stack.enter_context(FaultyProxy(self.store.url, listen=path))
            arguments = self.job.arguments(schema)
            self.daemon = stack.enter_context(DaemonHost(self.zygote, arguments, self.folder))
            if self.clock is not None:
                stack.callback(self.clock.jump, 0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, crash_at: str = "", crash_rank: int = 0) -> Start:
        """Start all ranks of the job.

        Args:
            crash_at: failpoint at which one of them dies.
            crash_rank: that rank.
        """
        number, self._num_starts = self._num_starts, self._num_starts + 1
        result = self.folder / f"result-{number}.json"
        store_url = self.proxy.url if self.proxy is not None else self.store.url
        arguments = [
            *self.job.arguments(self.folder / "schema.toml"),
            *("--store.url", store_url, "--store.timeout_s", "3"),
            *("--store.durability", "always" if self.durable else "memory", "--cacher.url", self.daemon.url),
            *("--cacher.timeout_s", "10", "--run.peer_timeout_s", "5", "--result", str(result)),
        ]
        if self.every:
            arguments += ["--checkpoint.dir", str(self.checkpoints), "--checkpoint.every", str(self.every)]
            # Starts overlap: one is stopped while the next begins, or outlives its launcher for a moment.
            arguments += ["--checkpoint.take_over", "true"]
            arguments += ["--checkpoint.full_every", str(self.full_every)]
        environment = {MARK: str(self.folder)}
        if "agent" in self.needs:
            launcher = [f"--nproc-per-node={self.job.world_size}", f"--max-restarts={_MAX_RESTARTS}", "--standalone"]
            streams = self.folder / f"start-{number}-agent"
            arguments = [*launcher, "-m", "trainer", *arguments]
            agent = self.zygote.start("torch.distributed.run", arguments, streams=streams, environment=environment)
            return Start(number=number, ranks=[agent], result=result)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment |= {key: str(self.job.world_size) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        ranks = [
            self.zygote.start(
                "trainer.cli",
                arguments,
                streams=self.folder / f"start-{number}-rank-{rank}",
                environment=environment
                | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                | ({"BAGPIPE_CRASH_AT": crash_at} if crash_at and rank == crash_rank else {}),
            )
            for rank in range(self.job.world_size)
        ]
        return Start(number=number, ranks=ranks, result=result)

    def workers(self) -> dict[int, int]:
        """Ranks by process id of the running `trainer` processes that a launcher has started."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):  # gone meanwhile
                    values = (folder / "environ").read_bytes().split(b"\0")
                    if f"{MARK}={self.folder}".encode() in values and b"trainer" in (folder / "cmdline").read_bytes():
                        ranks = [value for value in values if value.startswith(b"RANK=")]
                        found[int(folder.name)] = int(ranks[0].removeprefix(b"RANK=")) if ranks else 0
        return found

    def finish(self, start: Start) -> None:
        """Reap all ranks, killing those that still run."""
        start.signal(signal.SIGKILL, [rank for rank, item in enumerate(start.ranks) if not item.has_ended()])
        for rank in start.ranks:
            self.zygote.reap(rank)

    def heal(self) -> None:
        """Restore disk space, a network without faults, and both servers."""
        if self.proxy is not None:
            self.proxy.heal()
        for disk in (self.disk, self.store_disk):
            if disk is not None:
                disk.free()
        self.store.heal()
        self.daemon.heal()

    def steps_kept(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        steps = self.checkpoints.glob("generation-*/step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in steps), default=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
