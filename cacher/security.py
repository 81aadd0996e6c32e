"""Authentication: a listener that other machines can reach needs a secret, or TLS with client certificates.

metadata ──SecretInterceptor──> correct: the service    wrong or missing: UNAUTHENTICATED, before a request is read
client certificate ──client_of──> its names: a job is that of its first client    others: refused
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bagpipe.client.address import Address
from bagpipe.client.agreement import SECRET_METADATA
from bagpipe.errors import InputError
from bagpipe.util.secret_files import CACHER_SECRET
from cacher.counters import Counters

__all__ = [
    "MIN_SECRET_CHARACTERS",
    "Access",
    "SecretInterceptor",
    "check_access",
    "check_client",
    "client_of",
    "server_credentials",
]

_LOG = logging.getLogger("cacher")

#: The secret is compared as it is, without key stretching, so it must be long.
MIN_SECRET_CHARACTERS = 16

#: Methods that need no secret: health probes.
_OPEN_METHODS = ("/grpc.health.v1.Health/Check",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Secret and files that authenticate trainers and listener; an empty one is not used.

    Attributes:
        secret: shared with the trainers.
        tls_cert, tls_key: files of the listener's certificate and key.
        tls_client_ca: file of the certificate authority of the trainers' certificates.
    """

    secret: str = field(default="", repr=False)
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""


def check_access(listen: Address, access: Access) -> None:
    """Refuse an unprotected public listener.

    Raises:
        InputError: neither local nor protected, or an incomplete TLS setting.
    """
    if bool(access.tls_cert) != bool(access.tls_key):
        raise InputError("--tls-cert and --tls-key go together")
    if access.tls_client_ca and not access.tls_cert:
        raise InputError("--tls-client-ca needs --tls-cert and --tls-key")
    if access.tls_cert and listen.path:
        raise InputError(f"--tls-cert: a unix socket needs no TLS, got --listen {listen}")
    if listen.tls and not access.tls_cert:
        raise InputError(f"--listen {listen} needs --tls-cert and --tls-key")
    if not listen.is_local and not access.secret and not access.tls_client_ca:
        raise InputError(
            f"--listen {listen} can be reached from other machines: "
            f"give --secret-file (or {CACHER_SECRET} in the environment), or --tls-cert, --tls-key and --tls-client-ca"
        )


def server_credentials(access: Access) -> grpc.ServerCredentials | None:
    """TLS credentials from the files; None without TLS.

    Raises:
        InputError: a file cannot be read.
    """
    if not access.tls_cert:
        return None
    authority = _read(access.tls_client_ca, "--tls-client-ca") if access.tls_client_ca else None
    pair = (_read(access.tls_key, "--tls-key"), _read(access.tls_cert, "--tls-cert"))
    return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=authority is not None)


def client_of(context: Any) -> tuple[str, ...]:
    """Who the client of a call is, by its certificate: the names in it, else its hash. Empty: it has none."""
    found = context.auth_context()
    names = found.get("x509_subject_alternative_name") or found.get("x509_common_name")
    if names:
        return tuple(sorted(name.decode(errors="backslashreplace") for name in names))
    return tuple(hashlib.sha256(text).hexdigest() for text in found.get("x509_pem_cert", ()))


def check_client(label: str, first: tuple[str, ...], client: tuple[str, ...]) -> None:
    """Refuse a client whose certificate has other names than that of the job's first one.

    Args:
        label: of the job.
        first, client: as from `client_of`.

    Raises:
        InputError: they differ.
    """
    if client != first:
        raise InputError(
            f"job {label} belongs to a client with another certificate: expected its names in yours, "
            f"got {', '.join(client) or 'no certificate'}"
        )


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    """Rejects calls without the secret."""

    def __init__(self, secret: str, counters: Counters) -> None:
        self._secret = secret.encode()
        self._counters = counters
        self._refuse = grpc.stream_stream_rpc_method_handler(self._refused)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> grpc.RpcMethodHandler | None:
        if details.method in _OPEN_METHODS or self._knows(details.invocation_metadata):
            return await continuation(details)
        return self._refuse

    def _knows(self, metadata: Any) -> bool:
        given = [value for key, value in metadata if key == SECRET_METADATA]
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._secret)

    async def _refused(self, requests: object, context: Any) -> None:
        self._counters.add(refused=1)
        _LOG.warning("unauthenticated", extra={"peer": context.peer()})
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the shared secret is missing or wrong")


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from None
