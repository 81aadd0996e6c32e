"""Servers by URL: parsing, connecting, questions asked once. redis-py makes and authenticates every connection.

    store.url ──bagpipe.store.redis.urls──> Server (place without password, redis-py settings)
    Server ──connect──> redis-py connection, whose socket the hot path uses directly
           ──admin────> redis-py client for INFO, the schema record and scans

Every refusal is one `InputError` line that names the server and what to do, without the password.

Client retries are off: redis-py 8 re-sends up to ten times by default, writes too, and lets a deadline pass many times.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from bagpipe.errors import InputError, StoreError
from bagpipe.store.redis.link import Link

__all__ = [
    "PIPELINE_COMMANDS",
    "KeyCommand",
    "Server",
    "ServerSession",
    "Unreachable",
    "send_commands",
]

T = TypeVar("T")


#: Commands of one pipeline.
PIPELINE_COMMANDS = 1000


@dataclass(frozen=True, slots=True)
class KeyCommand:
    """Words of a command, and the key that says which server gets it."""

    key: bytes
    words: tuple[bytes | str | int, ...]


class Unreachable(InputError):
    """A server does not answer at all; another one, or the same a little later, may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a namespace.

    Attributes:
        place: its URL without the password, for messages.
        settings: redis-py's connection settings, password included; never printed.
        connection_class: redis-py's class for the URL's scheme.
    """

    place: str
    settings: dict[str, Any]
    connection_class: type[AbstractConnection]

    def __repr__(self) -> str:
        return f"Server({self.place})"

    def connect(self, timeout_s: float) -> Link:
        """A connected, authenticated link.

        Args:
            timeout_s: deadline of every step.

        Raises:
            Unreachable: nobody answers.
            InputError: refused, or not a Redis-protocol server.
        """
        connection = self.connection_class(**self._connection_settings(timeout_s))
        with self.refusals(timeout_s, connection.disconnect):
            connection.connect()
            # A server that wants a password accepts the connection and refuses the first command.
            connection.send_command("PING", check_health=False)
            if connection.read_response() != b"PONG":
                raise redis.ConnectionError("it did not answer PING with PONG")
        return Link(connection._sock, self.place, connection.disconnect)

    @property
    def database(self) -> int:
        """Number of the database at the server."""
        return int(self.settings["db"])

    def infos(self, timeout_s: float, *, with_fsync: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
        """(place, INFO) of every server behind this URL: of this one.

        Args:
            timeout_s: deadline.
            with_fsync: put its appendfsync there too.

        Raises:
            InputError: as for `admin`, or the server has only a part of a cluster's keys.
        """
        info = self.info(timeout_s, with_fsync=with_fsync)
        if int(info.get("cluster_enabled", 0)):
            raise InputError(
                f"store {self.place} is a node of a cluster, expected a server on its own; use redis+cluster:// instead"
            )
        return [(self.place, info)]

    def info(self, timeout_s: float, *, with_fsync: bool) -> dict[str, Any]:
        """INFO, see `infos`."""
        with self.admin(timeout_s) as client:
            info = dict(client.info())
            if with_fsync:
                try:
                    answer = client.execute_command("CONFIG GET", "appendfsync")
                except redis.ResponseError as error:
                    raise InputError(
                        f"store {self.place} does not tell its appendfsync, which store.durability needs to know: "
                        f"grant the user +config|get, or set store.durability = memory ({error})"
                    ) from error
                info["appendfsync"] = next((_text(value) for value in answer.values()), "unknown")
        return info

    @contextmanager
    def session(self, timeout_s: float) -> Iterator[ServerSession]:
        """Commands on keys of this server; its errors come out as `InputError`."""
        with self.admin(timeout_s) as client:
            yield ServerSession(self, client, timeout_s)

    @contextmanager
    def admin(self, timeout_s: float, *, client_class: type[redis.Redis] = redis.Redis) -> Iterator[redis.Redis]:
        """A client for a few commands; its errors come out as `InputError`."""
        pool = ConnectionPool(connection_class=self.connection_class, **self._connection_settings(timeout_s))
        client = client_class(connection_pool=pool)
        try:
            with self.refusals(timeout_s):
                yield client
        finally:
            client.close()
            pool.disconnect()

    def _connection_settings(self, timeout_s: float) -> dict[str, Any]:
        return {
            **self.settings,
            "protocol": 2,  # RESP2: the reply formats that bagpipe.store.redis.resp_rows decodes
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "decode_responses": False,
        }

    @contextmanager
    def refusals(self, timeout_s: float, cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn redis-py's errors into one line that names the server and what to do."""
        try:
            yield
        except (InputError, StoreError):
            cleanup()
            raise
        except (redis.RedisError, OSError, ValueError, TypeError) as error:
            cleanup()
            kind = Unreachable if _is_unreachable(error) else InputError
            advice = _advice(error, self.connection_class)
            raise kind(f"store {self.place}: {_explain(error, timeout_s)}{advice}") from error
        except BaseException:
            cleanup()
            raise


class ServerSession:
    """Runs calls on a client of one server. A cluster's session chooses the client by the key."""

    def __init__(self, server: Server, client: redis.Redis, timeout_s: float) -> None:
        self._server = server
        self._client = client
        self._timeout_s = timeout_s

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """What `call` returns, given a client of the server that has `key`; it may be called more than once."""
        with self._server.refusals(self._timeout_s):
            return call(self._client)

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Their answers, in order; commands go out many at a time."""
        answers: list[Any] = []
        with self._server.refusals(self._timeout_s):
            for start in range(0, len(commands), PIPELINE_COMMANDS):
                answers += send_commands(self._client, commands[start : start + PIPELINE_COMMANDS], raise_on_error=True)
        return answers


def send_commands(client: redis.Redis, commands: Sequence[KeyCommand], *, raise_on_error: bool) -> list[Any]:
    """Send commands at once; their answers, which may be errors unless those are raised."""
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command.words)
        answers: list[Any] = pipeline.execute(raise_on_error=raise_on_error)
        return answers


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _is_unreachable(error: Exception) -> bool:
    if _tls_cause(error) is not None or isinstance(error, redis.AuthenticationError | redis.InvalidResponse):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)


def _explain(error: Exception, timeout_s: float) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    tls = _tls_cause(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        advice = "; the option ssl_ca_certs names the authority to trust" if tls.verify_code in _UNKNOWN_ISSUER else ""
        return f"its certificate is refused: {tls.verify_message}{advice}"
    if tls is not None:
        return f"no TLS connection: {tls.reason or text}{_NO_TLS}"
    for kind, explanation in _EXPLANATIONS:
        if isinstance(error, kind):
            return explanation.format(text=text, timeout_s=timeout_s)
    return text


def _advice(error: Exception, connection_class: type[AbstractConnection]) -> str:
    """What to look at if one side may speak TLS and the other not."""
    text = str(error)
    # A server that wants TLS hangs up on whoever greets it plainly; one that does not waits for the rest of a line.
    if connection_class is Connection and ("reset by peer" in text or "closed by server" in text):
        return "; if it speaks TLS, the URL begins with rediss"
    if connection_class is SSLConnection and isinstance(error, redis.TimeoutError) and "connecting" in text:
        return _NO_TLS
    return ""


def _tls_cause(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error behind redis-py's, if that is what it was."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


_NO_TLS = "; does the server speak TLS on this port?"

#: OpenSSL's verify codes 18 to 21: self-signed, or no issuer that is trusted (X509_V_ERR_*, x509_vfy.h).
_UNKNOWN_ISSUER = range(18, 22)

#: First match wins, so subclasses stand before their bases.
_EXPLANATIONS: tuple[tuple[type[Exception], str], ...] = (
    (NoPermissionError, "the user may not run a command that is needed: {text}"),
    (redis.AuthenticationError, "user or password refused, give both in the URL ({text})"),
    (redis.TimeoutError, "no answer within store.timeout_s = {timeout_s:g} s ({text})"),
    (redis.InvalidResponse, "expected a Redis-protocol server, got another protocol ({text})"),
    (redis.ConnectionError, "cannot be reached: {text}"),
    (OSError, "cannot be reached: {text}"),
    (redis.ResponseError, "the server answered: {text}"),
)
