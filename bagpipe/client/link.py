"""`Stream`: one gRPC connection to a cacher with one call. `Link`: that of a `Train` call.

    put(request) ──queue──> Train stream ──> messages()    lost ─> LinkLost    refused ─> InputError, JobError
                            memory of the cacher ─┘        large messages, on one host

`Receiver` decides whether to reconnect.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address
from bagpipe.client.agreement import MAX_CACHER_MESSAGE_BYTES, MAX_TRAINER_MESSAGE_BYTES, SECRET_METADATA
from bagpipe.client.cacher_pb2_grpc import CacherStub
from bagpipe.client.shared_ring import RingReader, SharedFile
from bagpipe.config.sections import CacherConfig
from bagpipe.errors import InputError, JobError
from bagpipe.util.secret_files import CACHER_SECRET, read_secret

__all__ = ["Credentials", "Link", "LinkLost", "Stream"]

_KEEPALIVE_MS = 20_000
_FINAL = {
    grpc.StatusCode.UNIMPLEMENTED: "is no bagpipe cacher",
    grpc.StatusCode.INVALID_ARGUMENT: "did not understand us",
    grpc.StatusCode.PERMISSION_DENIED: "refused us",
    grpc.StatusCode.UNKNOWN: "failed",
}

#: gRPC's text for a broken connection, with status UNKNOWN.
_CUT = "Stream removed"


class LinkLost(Exception):
    """The connection broke or could not be made. A retry can succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of a trainer. All empty: none.

    Attributes:
        secret: shared with the cacher.
        tls_ca, tls_cert, tls_key: contents of PEM files.
    """

    secret: str = field(default="", repr=False)
    tls_ca: bytes | None = None
    tls_cert: bytes | None = None
    tls_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(cls, config: CacherConfig, secret: str = "") -> Credentials:
        """Read the files that a configuration names, or the environment. `secret` replaces the one given there.

        Raises:
            InputError: a file cannot be read, or other users can read the secret.
        """
        if not secret:
            secret = read_secret(config.secret_file, subject="cacher.secret_file", variable=CACHER_SECRET)
        tls = {
            key.removeprefix("cacher."): _read(key, path) if path else None
            for key, path in (
                ("cacher.tls_ca", config.tls_ca),
                ("cacher.tls_cert", config.tls_cert),
                ("cacher.tls_key", config.tls_key),
            )
        }
        if (tls["tls_cert"] is None) != (tls["tls_key"] is None):
            raise InputError("cacher.tls_cert and cacher.tls_key go together")
        return cls(secret=secret, **tls)


class Stream:
    """One connection with one call. Context manager. One thread reads `messages`.

    Args:
        address: of the cacher.
        credentials: authenticate the trainer.
        method: of the service.
        requests: read by a thread of gRPC, as fast as the cacher takes them. Must end once the stream is cancelled.
    """

    def __init__(self, address: Address, credentials: Credentials, method: str, requests: Iterator[Any]) -> None:
        self._address = address
        self._channel = _open_channel(address, credentials)
        metadata = [(SECRET_METADATA, credentials.secret)] if credentials.secret else []
        self._call: Any = getattr(CacherStub(self._channel), method)(requests, metadata=metadata)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self._channel.close()

    def cancel(self) -> None:
        """Cancel the call. A thread in `messages` gets LinkLost. From any thread."""
        self._call.cancel()

    def messages(self) -> Iterator[Any]:
        """The cacher's messages until it ends the stream.

        Raises:
            LinkLost: the connection failed.
            InputError: the cacher refused the secret or certificate.
            JobError: the listener is not a cacher, did not understand the request, or failed.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def _explained(self, error: Any) -> Exception:
        code, details = error.code(), " ".join(str(error.details()).split())
        details = details.rpartition("last error: ")[2][:300]  # after "failed to connect to all addresses"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return InputError(f"the cacher at {self._address} refused us: {details}")
        if code in _FINAL and not details.startswith(_CUT):
            return JobError(f"what listens at {self._address} {_FINAL[code]}: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return JobError(f"the cacher at {self._address} sent too large a message: {details}")
        return LinkLost(details or code.name)


class Link(Stream):
    """A `Train` stream. One thread reads `messages`; any thread can `put`.

    Args:
        address: of the cacher.
        credentials: authenticate the trainer.
    """

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._requests: queue.SimpleQueue[pb.TrainerMessage | None] = queue.SimpleQueue()
        self._ring: RingReader | None = None
        self._open = ExitStack()
        super().__init__(address, credentials, "Train", iter(self._requests.get, None))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._open.close()

    def messages(self) -> Iterator[pb.CacherMessage]:
        """See `Stream`. Those in the cacher's memory are taken from there."""
        for message in super().messages():
            kind = message.WhichOneof("kind")
            if kind == "shared":
                yield self._taken(message.shared)
                continue
            if kind == "welcome" and message.welcome.HasField("file"):
                self._share(message.welcome.file)
            yield message

    def put(self, **kind: Any) -> None:
        """Send a request: ``put(ack=pb.Ack(…))``. Never blocks. A lost link drops the request."""
        self._requests.put(pb.TrainerMessage(**kind))

    def finish(self) -> None:
        """End the requests."""
        self._requests.put(None)

    def cancel(self) -> None:
        """See `Stream`."""
        self._requests.put(None)
        super().cancel()

    def _share(self, file: pb.SharedFile) -> None:
        """Open the cacher's file of messages and tell it so, unless the file is out of reach from here."""
        if not self._address.path or self._ring is not None:
            return
        ring = RingReader(SharedFile(pid=file.pid, fd=file.fd, num_bytes=file.num_bytes, nonce=file.nonce))
        with suppress(OSError, ValueError):  # a container with other processes, a system without /proc
            self._ring = self._open.enter_context(ring)
            self.put(share=pb.Share())

    def _taken(self, shared: pb.Shared) -> pb.CacherMessage:
        """A message in shared memory."""
        if self._ring is None:
            raise JobError("the cacher sent a message in shared memory, which is not open")
        try:
            message: pb.CacherMessage = pb.CacherMessage.FromString(self._ring.take(shared.start, shared.num_bytes))
        except (OSError, ValueError, DecodeError) as error:
            raise JobError(f"the cacher sent a message in shared memory that cannot be read: {error}") from None
        return message


def _open_channel(address: Address, credentials: Credentials) -> grpc.Channel:
    options = [
        ("grpc.max_receive_message_length", MAX_CACHER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_TRAINER_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Each link reconnects immediately. `Receiver` alone decides the delay between attempts.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    if not address.tls:
        return grpc.insecure_channel(address.target, options=options)
    tls = grpc.ssl_channel_credentials(credentials.tls_ca, credentials.tls_key, credentials.tls_cert)
    return grpc.secure_channel(address.target, tls, options=options)


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{key} {path}: {error.strerror}") from None
