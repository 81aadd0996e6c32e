"""Servers by URL: parsing, connecting, questions asked once. redis-py makes and authenticates every connection.

    URL list ──parse_urls──> Server (place without password, redis-py settings)
    Server ──connect──> redis-py connection, whose socket the hot path uses directly
           ──admin────> redis-py client for INFO, the schema record and scans

Client retries are off: redis-py 8 re-sends up to ten times by default, writes too, and lets a deadline pass many times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, parse_url
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from bagpipe.errors import InputError, StoreError
from bagpipe.store.exchange import Link

__all__ = ["Server", "parse_urls", "redact"]

#: Options of a URL's query that mean something here; redis-py's own names. Others would break what we rely on.
_QUERY_OPTIONS = frozenset(
    {
        "db",
        "username",
        "password",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_cert_reqs",
        "ssl_check_hostname",
    }
)
_HIDDEN = "***"
#: A comma starts another URL only where a scheme follows, so a socket path may hold commas.
_NEXT_URL = re.compile(r",\s*(?=[a-z][a-z+]*://)")


def redact(url: str) -> str:
    """The URL with its password, wherever it stands, replaced by stars. Never raises."""
    # By pattern, not by parsing: a URL that cannot be parsed is the one that ends up in a message. Up to the last
    # @, since a password that was not percent-encoded may hold one.
    url = re.sub(r"(://[^:@/]*:).*@", rf"\1{_HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"([?&]password=)[^&]*", rf"\1{_HIDDEN}", url)


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

        Raises:
            InputError: unreachable, refused, or not a Redis-protocol server.
        """
        connection = self.connection_class(**self._connection_settings(timeout_s))
        with self._refusals(timeout_s, connection.disconnect):
            connection.connect()
            # A server that wants a password accepts the connection and refuses the first command.
            connection.send_command("PING", check_health=False)
            if connection.read_response() != b"PONG":
                raise redis.ConnectionError("it did not answer PING with PONG")
        return Link(connection._sock, self.place, connection.disconnect)

    @contextmanager
    def admin(self, timeout_s: float) -> Iterator[redis.Redis]:
        """A client for a few commands; its errors come out as `InputError`."""
        pool = ConnectionPool(connection_class=self.connection_class, **self._connection_settings(timeout_s))
        client = redis.Redis(connection_pool=pool)
        try:
            with self._refusals(timeout_s):
                yield client
        finally:
            client.close()
            pool.disconnect()

    def _connection_settings(self, timeout_s: float) -> dict[str, Any]:
        return {
            **self.settings,
            "protocol": 2,  # RESP2: the reply formats that bagpipe.store.wire decodes
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            "decode_responses": False,
        }

    @contextmanager
    def _refusals(self, timeout_s: float, cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn redis-py's errors into one line that names the server and what to do."""
        try:
            yield
        except (InputError, StoreError):
            cleanup()
            raise
        except (redis.RedisError, OSError, ValueError, TypeError) as error:
            cleanup()
            raise InputError(f"store {self.place}: {_explain(error, timeout_s)}") from error
        except BaseException:
            cleanup()
            raise


def _explain(error: Exception, timeout_s: float) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    for kind, explanation in _EXPLANATIONS:
        if isinstance(error, kind):
            return explanation.format(text=text, timeout_s=timeout_s)
    return text


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


def parse_urls(urls: str) -> tuple[Server, ...]:
    """Servers of a comma-separated URL list: redis://, rediss:// and unix://.

    Raises:
        InputError: a URL cannot be read, or one appears twice.
    """
    servers = tuple(_parse_one(url.strip()) for url in _NEXT_URL.split(urls))
    for number, server in enumerate(servers):
        if any(server.settings == other.settings for other in servers[:number]):
            raise InputError(f"store.url names a server twice: {server.place}")
    return servers


def _parse_one(url: str) -> Server:
    place = redact(url)
    try:
        parts = urlsplit(url)
        database = parts.path.strip("/") if parts.scheme != "unix" else ""
        if database and not database.isdigit():
            raise InputError(f"store.url: the path of {place} must be a database number, got {database!r}")
        if parts.scheme == "unix" and not parts.path:
            raise InputError(f"store.url: {place} names no socket, expected unix:///path/to/socket")
        unknown = sorted({name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - _QUERY_OPTIONS)
        if unknown:
            raise InputError(
                f"store.url: {place} has the option {unknown[0]!r}, known options: {', '.join(sorted(_QUERY_OPTIONS))}"
            )
        settings = dict(parse_url(url))
        settings["db"] = int(settings.get("db", 0))
    except ValueError as error:
        raise InputError(f"store.url: {place} cannot be read: {error}") from None
    connection_class: type[AbstractConnection] = settings.pop("connection_class", Connection)
    return Server(place=place, settings=settings, connection_class=connection_class)
