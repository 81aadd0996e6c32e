"""Cachers under test: a daemon process, a server in a thread, a proxy that cuts connections, and expected batches.

config(…) ─> Daemon | served ─> all_batches(url, …): every rank in a thread, compared with PlannedData's own batches
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from bagpipe.client import link
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import settings_of
from bagpipe.client.remote import RemoteBatches
from bagpipe.client.shared_ring import RingReader, SharedFile
from bagpipe.config.sections import CacheConfig, CacherConfig, Config, DataConfig, OracleConfig, RunConfig
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_batch import Phase, RankBatch
from bagpipe.types.schema import DataSchema
from cacher.planning import PlannedData
from cacher.security import Access
from cacher.server import CacherServer, Limits
from tests.client.rank_batches import assert_same
from tests.relays import OnReadable, SocketRelay, close_pair

ROOT = Path(__file__).parents[2]


def children_of(process: int | str) -> list[int]:
    """Process ids of what any thread of a process has started, and that has not been waited for."""
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += [int(child) for child in path.read_text().split()]
    return found


def config(
    *,
    batch_size: int = 50,
    limit: int = 1000,
    rows: int = 50_000,
    lookahead: int = 3,
    seed: int = 5,
    assign: str = "contiguous",
    timeout_s: float = 20.0,
    **data: Any,
) -> Config:
    """A small job over synthetic data: 18 training batches, 2 held out."""
    values = {"format": "synthetic", "eval_fraction": 0.1, "workers": 0, **data}
    return Config(
        data=DataConfig(batch_size=batch_size, limit=limit, **values),
        oracle=OracleConfig(lookahead=lookahead),
        cache=CacheConfig(rows=rows),
        cacher=CacherConfig(assign=assign, timeout_s=timeout_s),
        run=RunConfig(seed=seed),
    )


def spec_of(job: Config, schema: DataSchema, world_size: int = 1, shares: tuple[int, ...] = ()) -> OracleSpec:
    """Oracle spec of a trainer with one table per feature."""
    return OracleSpec(
        table_rows=tuple(schema.table(feature.table).rows for feature in schema.features),
        features=tuple(FeatureRef(feature=number, table=number) for number in range(len(schema.features))),
        num_slots=job.cache.rows,
        lookahead=job.oracle.lookahead,
        policy=job.oracle.policy,
        world_size=world_size,
        assign=job.cacher.assign,
        example_shares=shares,
    )


def planned_batches(
    job: Config, world_size: int = 1, phase: Phase = "train", shares: tuple[int, ...] = (), **options: int
) -> list[list[RankBatch]]:
    """Expected batches of every rank, planned in this process."""
    data = PlannedData(job.data, job.run.seed)
    spec = spec_of(job, data.schema, world_size, shares)
    batches = list(data.phase(phase, spec, **options))
    return [[batch.for_rank(rank) for batch in batches] for rank in range(world_size)]


def assert_same_batches(ours: Sequence[RankBatch], theirs: Sequence[RankBatch]) -> None:
    assert [rank_batch.batch.index for rank_batch in ours] == [rank_batch.batch.index for rank_batch in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


def remote(url: str, job: Config, **options: Any) -> RemoteBatches:
    return RemoteBatches(url, job, **{"credits": 3, **options})


def all_batches(
    url: str,
    job: Config,
    world_size: int = 1,
    *,
    phases: Sequence[Phase] = ("train",),
    job_id: str = "job",
    take: Callable[[int, Iterator[RankBatch]], list[RankBatch]] = lambda rank, rank_batches: list(rank_batches),
    **options: Any,
) -> list[list[RankBatch]]:
    """Batches of every rank over the given phases, one thread per rank; `take` reads a phase."""

    def run(rank: int) -> list[RankBatch]:
        with remote(url, job, rank=rank, world_size=world_size, job_id=job_id, **options) as source:
            spec = spec_of(job, source.schema, world_size)
            return [rank_batch for phase in phases for rank_batch in take(rank, source.batches(phase, spec))]

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


class Daemon:
    """A `python -m cacher` process. Entering waits until it listens."""

    def __init__(self, job: Config, listen: str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        keys = {**settings_of(job), "data.workers": job.data.workers}
        settings = [
            f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
        ]
        self._command = [sys.executable, "-m", "cacher", "--listen", listen, *settings, *flags]
        self.logs: list[dict[str, Any]] = []
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        assert self._listening.wait(30)
        if not self.url:
            self.__exit__()
            raise AssertionError(f"the daemon ended: {self.logs}")
        return self

    def start(self) -> None:
        """Start the process, without waiting until it listens."""
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def kill(self) -> None:
        """SIGKILL the daemon, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait()

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def events(self) -> list[str]:
        return [line["event"] for line in self.logs]

    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": raw.decode(errors="replace")}
            self.logs.append(line)
            if line["event"] == "listening":
                self.url = line["address"]
                self._listening.set()
        self._listening.set()


def refused_daemon(*arguments: str, timeout_s: float = 30) -> tuple[int, str]:
    """Exit code and standard error of a daemon that fails to start."""
    command = [sys.executable, "-m", "cacher", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stderr


@contextmanager
def served(
    job: Config,
    listen: str,
    *,
    data: PlannedData | None = None,
    access: Access | None = None,
    limits: Limits | None = None,
) -> Iterator[CacherServer]:
    """A server in a thread of this process."""
    started: Future[tuple[CacherServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        planned = PlannedData(job.data, job.run.seed) if data is None else data
        server = CacherServer(planned, settings_of(job), parse_address(listen), access=access, limits=limits)
        async with server:
            started.set_result((server, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            started.set_exception(error)

    thread = threading.Thread(target=run, name="served-cacher")
    thread.start()
    try:
        server, loop, stop = started.result(30)
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(30)
        assert not thread.is_alive()


class CuttingProxy(SocketRelay):
    """A proxy between trainers and a cacher; it cuts every connection after so many bytes towards the trainer.

    The cacher seems to be on another host: trainers that connect meanwhile cannot open its memory.

    Args:
        path: of the unix socket it listens on.
        target: path of the cacher's socket.
        cuts: bytes allowed on each connection in turn; later connections are not cut.
    """

    def __init__(self, path: Path, target: Path, cuts: Sequence[int]) -> None:
        super().__init__(path, target)
        self.url = f"unix:{path}"
        self.num_cut = 0
        self._cuts = list(cuts)
        self._memory = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._memory.enter_context(without_shared_memory())
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.close()
        super().__exit__(*error)

    def _handlers(self, ours: socket.socket, theirs: socket.socket) -> tuple[OnReadable, OnReadable]:
        left = [self._cuts.pop(0) if self._cuts else 1 << 60]

        def forward(selector: selectors.BaseSelector, source: socket.socket, sink: socket.socket) -> None:
            try:
                data = source.recv(1 << 16)
                if source is theirs:
                    data, left[0] = data[: left[0]], left[0] - len(data)
                sink.sendall(data)
            except OSError:
                data = b""
            if not data or left[0] <= 0:
                self.num_cut += left[0] <= 0
                close_pair(selector, ours, theirs)

        return lambda selector: forward(selector, ours, theirs), lambda selector: forward(selector, theirs, ours)


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Trainers of this process look for their cacher's memory in a process that does not exist."""

    def out_of_reach(file: SharedFile) -> RingReader:
        return RingReader(dataclasses.replace(file, pid=1 << 30))

    before, link.RingReader = link.RingReader, out_of_reach
    try:
        yield
    finally:
        link.RingReader = before


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
