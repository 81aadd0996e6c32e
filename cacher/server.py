"""`CacherServer`: the daemon's network side in one event loop: listener, limits, health check, shutdown.

listen ─> gRPC core (limits, keepalive, TLS) ─> secret ─> TrainService ─> Jobs ─> Run threads
                                                         └> PlanService ─> PlanStream threads
drain: NOT_SERVING, no new jobs ─> last job ends, or timeout ─> exit: streams and threads end
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address
from bagpipe.client.agreement import MAX_CACHER_MESSAGE_BYTES, MAX_TRAINER_MESSAGE_BYTES
from bagpipe.errors import InputError
from bagpipe.oracle.sizing import MAX_SLOT_BYTES
from cacher.admission import Admission
from cacher.calls import Calls
from cacher.counters import Counters, Totals
from cacher.jobs import Jobs
from cacher.plan_service import PlanService
from cacher.planning import PlannedData
from cacher.run import RunStatistics
from cacher.security import Access, SecretInterceptor, check_access, server_credentials
from cacher.service import TrainService
from cacher.shard_link import ShardTotals
from cacher.shard_service import IndexService

__all__ = ["CacherServer", "Limits", "Snapshot"]

_LOG = logging.getLogger("cacher")

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Cacher"].full_name

_MS = 1000
_MAX_METADATA_BYTES = 16 << 10
#: A trainer needs one; health probes need a few.
_MAX_STREAMS_PER_CONNECTION = 16
_MIN_PING_INTERVAL_MS = 5000
#: If file descriptors have no limit.
_MAX_CONNECTIONS = 1 << 20
#: Most ranks that get large messages through memory, 32 MiB each: more than one host has.
_MAX_RINGS = 256
#: File descriptors that connections and rings leave to the jobs' readers and worker processes, at most half of all.
_RESERVED_DESCRIPTORS = 512
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and timeouts of the daemon.

    Attributes:
        max_jobs: most concurrent jobs.
        plan_bytes: memory that each planner of a job with batches of its own may take, its window included.
        hello_timeout_s: longest silence at the start of a connection or stream.
        start_timeout_s: a job that has asked for nothing in this time makes room for another.
        grace_s: how long to wait for a rank whose connection broke.
        drain_timeout_s: how long jobs can go on after SIGTERM.
        stop_grace_s: how long the daemon waits, when it stops, for calls that are ending. Cancelling them would make
            gRPC in a trainer that is leaving log an error.
        keepalive_s: silence after which a peer is pinged, and after as long again dropped.
        idle_s: a connection without a stream is closed after this time.
    """

    max_jobs: int = 8
    plan_bytes: int = MAX_SLOT_BYTES
    hello_timeout_s: float = 10.0
    start_timeout_s: float = 600.0
    grace_s: float = 120.0
    drain_timeout_s: float = 3600.0
    stop_grace_s: float = 1.0
    keepalive_s: float = 20.0
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the daemon.

    Attributes:
        totals: since it started.
        jobs, ranks: served, connected.
        planners: of jobs with batches of their own.
        silent: streams without a Hello.
        indexing: phases indexed as a shard of other cachers.
        is_draining: no new jobs are taken.
        runs: label of the job, run number and state of every run.
        shards: name and totals of every shard of this daemon.
    """

    totals: Totals
    jobs: int
    ranks: int
    planners: int
    silent: int
    indexing: int
    is_draining: bool
    runs: tuple[tuple[str, int, RunStatistics], ...]
    shards: tuple[tuple[str, ShardTotals], ...] = ()


class CacherServer:
    """Serves inside an ``async with`` block.

    Args:
        data: planned for all jobs that bring no batches; None: there are no such jobs.
        settings: configuration that every trainer must share.
        listen: address; port 0 is any.
        access: secret and TLS files.
        limits: see `Limits`.

    Attributes:
        address: where it listens, with the actual port.
        jobs, counters: for the metrics.
    """

    def __init__(
        self,
        data: PlannedData | None,
        settings: Mapping[str, Any],
        listen: Address,
        *,
        access: Access | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.address = listen
        self.counters = Counters()
        self._limits = Limits() if limits is None else limits
        self._admission = Admission(self._limits.max_jobs, start_timeout_s=self._limits.start_timeout_s)
        self.jobs = Jobs(
            data, settings, admission=self._admission, grace_s=self._limits.grace_s, counters=self.counters
        )
        self._calls = Calls(self.counters, hello_timeout_s=self._limits.hello_timeout_s)
        max_rings = descriptor_shares()[1] if listen.path else 0
        self._training = TrainService(self.jobs, data, self._calls, self.counters, max_rings=max_rings)
        self._planning = PlanService(self._admission, self._calls, self.counters, max_bytes=self._limits.plan_bytes)
        self._indexing = IndexService(data, settings, self._calls, self.counters, shares_memory=bool(listen.path))
        self._data = data
        self._access = Access() if access is None else access
        self._health = health.aio.HealthServicer()
        self._server: Any = None

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            InputError: the address, a secret or a certificate cannot be used.
        """
        check_access(self.address, self._access)
        credentials = server_credentials(self._access)
        interceptors = []
        if self._access.secret:
            interceptors.append(SecretInterceptor(self._access.secret, self.counters))
        self._server = grpc.aio.server(interceptors=interceptors, options=self._options())
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = self._bind(credentials)
        await self._server.start()
        await self._say(health_pb2.HealthCheckResponse.SERVING)
        if not self.address.is_local and credentials is None:
            _LOG.warning("no TLS: the secret and the data cross the network in the clear")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all streams and threads."""
        runs = self.jobs.stop()
        await self._server.stop(grace=self._limits.stop_grace_s)
        joins = [
            *(run.join for run in runs),
            *(stream.join for stream in self._planning.ending()),
            *(stream.join for stream in self._indexing.ending()),
        ]
        for join in joins:
            await asyncio.to_thread(join, _JOIN_TIMEOUT_S)
        if self.address.path:
            with suppress(OSError):
                os.unlink(self.address.path)

    async def drain(self) -> None:
        """Refuse new jobs. Wait for the current ones, `drain_timeout_s` at most."""
        self._admission.drain()
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_timeout_s):
                await self._admission.wait_empty()
                _LOG.info("drained")

    def snapshot(self) -> Snapshot:
        """The current state. On the loop's thread only."""
        runs = tuple((job, number, run.statistics()) for job, number, run in self.jobs.runs())
        return Snapshot(
            totals=self.counters.totals(),
            jobs=self._admission.num_jobs,
            ranks=self.jobs.counts()[1],
            planners=self._planning.num_streams,
            silent=self._calls.num_silent,
            indexing=self._indexing.num_streams,
            is_draining=self._admission.is_draining,
            runs=runs,
            shards=self._shards(),
        )

    def _shards(self) -> tuple[tuple[str, ShardTotals], ...]:
        shards = None if self._data is None else self._data.shards
        return () if shards is None else tuple(zip(shards.names(), shards.totals, strict=True))

    def _handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods. Messages pass as bytes: sent ones are serialised already."""
        methods = {"Train": self._training.train, "Plan": self._planning.plan, "Index": self._indexing.index}
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        )

    async def _say(self, status: int) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _bind(self, credentials: grpc.ServerCredentials | None) -> Address:
        address = self.address
        if address.path:
            _check_unused(address.path)
        # Other users must not connect.
        mask = os.umask(0o077)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address.target)
            else:
                port = self._server.add_secure_port(address.target, credentials)
        except RuntimeError as error:
            raise InputError(f"--listen {address}: cannot listen there ({_reason(error)})") from None
        finally:
            os.umask(mask)
        return address if address.path else replace(address, port=port, tls=credentials is not None)

    def _options(self) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            # Compared with the length in a message's header before anything is allocated.
            ("grpc.max_receive_message_length", MAX_TRAINER_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_CACHER_MESSAGE_BYTES),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
            ("grpc.max_allowed_incoming_connections", descriptor_shares()[0]),
            # A second daemon on the same port is an error.
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", round(limits.hello_timeout_s * _MS)),
            ("grpc.max_connection_idle_ms", round(limits.idle_s * _MS)),
            ("grpc.keepalive_time_ms", round(limits.keepalive_s * _MS)),
            ("grpc.keepalive_timeout_ms", round(limits.keepalive_s * _MS)),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.keepalive_permit_without_calls", 1),
        ]


def descriptor_shares() -> tuple[int, int]:
    """(most connections, most files of shared memory) at a time; the other descriptors are left to the jobs.

    Connections beyond are closed at once, silent ones count. gRPC sets no limit of its own: without one, connections
    take all descriptors, and a job whose reader opens its next file ends.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS, _MAX_RINGS
    rings = min(_MAX_RINGS, limit // 8)
    return min(_MAX_CONNECTIONS, limit - min(_RESERVED_DESCRIPTORS, limit // 2) - rings), rings


def _check_unused(path: str) -> None:
    """Refuse a socket that another process serves, which gRPC would silently take over, or without a folder.

    Raises:
        InputError: a process accepts connections there, it is not a socket, or its folder does not exist.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InputError(f"--listen unix:{path}: the folder {folder} does not exist; make it first")
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by a killed process
        except OSError as error:
            raise InputError(f"--listen unix:{path}: {error.strerror or error}") from None
    raise InputError(f"--listen unix:{path}: another process listens there")


def _reason(error: RuntimeError) -> str:
    """The reason in gRPC's error text."""
    return " ".join(str(error).split())[:200]
