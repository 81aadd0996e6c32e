"""`Server`: one server of a URL. redis-py opens and authenticates every connection.

    store.url ──bagpipe.store.redis.urls──> Server (endpoint without password, redis-py settings)
    Server ──connect──> redis-py connection, whose socket the row path uses directly
           ──admin────> redis-py client for INFO, the schema record and scans; replies bounded by `BoundedSocket`

Every refusal is a one-line `InputError` that names the server and the fix, without the password. So is an answer of
another form than its command's: `KeyCommand.expects`.

redis-py's retries are off: version 8 re-sends up to ten times by default, including writes, and exceeds deadlines.
Sent again, until the deadline, is only what a server refuses for the time being: `until_served`.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis
from redis._parsers import _RESP2Parser  # hiredis takes memory for as many elements as an array's header promises
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from bagpipe.errors import InputError, StoreError
from bagpipe.store.redis.bounded_socket import ReplyTooLarge, bounded
from bagpipe.store.redis.link import Link
from bagpipe.store.redis.passing import is_passing_error, line_of
from bagpipe.store.redis.remedies import with_remedy
from bagpipe.store.redis.reply_forms import ReplyForm, info_number
from bagpipe.store.redis.server_versions import drops_transactions

__all__ = [
    "PIPELINE_COMMANDS",
    "KeyCommand",
    "NotNow",
    "Server",
    "ServerSession",
    "Unreachable",
    "is_denied",
    "send_commands",
    "until_served",
]

T = TypeVar("T")


#: Commands per pipeline. The states of so many buckets with the logs of 1,024 writers in two epochs each, as a crash
#: between the two can leave them, fit into `MAX_REPLY_BYTES`.
PIPELINE_COMMANDS = 64
#: Characters of an unexpected reply in its message.
_SHOWN = 60
#: Pauses before a refused command is sent again: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)


@dataclass(frozen=True, slots=True)
class KeyCommand:
    """A command.

    Attributes:
        key: determines its server.
        words: sent.
        expects: form of its reply.
    """

    key: bytes
    words: tuple[bytes | str | int, ...]
    expects: ReplyForm

    def check(self, reply: object) -> None:
        """Raise redis.InvalidResponse unless the reply has the expected form."""
        if not self.expects.fits(reply):
            text = repr(reply)
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise redis.InvalidResponse(f"{self.words[0]!s} was answered {shown}, expected {self.expects.name}")


class Unreachable(InputError):
    """A server does not answer; another one, or the same one later, can."""


class NotNow(Unreachable):
    """A server refuses commands for the time being. See `bagpipe.store.redis.passing`."""


def is_denied(error: BaseException) -> bool:
    """Whether a server refused a command because the user has no right to it."""
    return isinstance(error.__cause__, NoPermissionError) or "NOPERM " in str(error)


def until_served(call: Callable[[], T], timeout_s: float) -> T:
    """Return `call()`; call it again, after a pause, while a server refuses for the time being.

    Raises:
        NotNow: a server still does so after `timeout_s`.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, _PAUSES_S[0]
    while True:
        try:
            return call()
        except NotNow as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise NotNow(f"{error}; so it answered for store.timeout_s = {timeout_s:g} s") from error
        threading.Event().wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _PAUSES_S[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server of a namespace.

    Attributes:
        endpoint: its URL without the password, for messages.
        settings: redis-py's connection settings, password included; never printed.
        connection_class: redis-py's class for the URL's scheme.
    """

    endpoint: str
    settings: dict[str, Any]
    connection_class: type[AbstractConnection]

    def __repr__(self) -> str:
        return f"Server({self.endpoint})"

    def connect(self, timeout_s: float) -> Link:
        """A connected, authenticated link.

        Args:
            timeout_s: limit of every step.

        Raises:
            Unreachable: no answer, or the server refuses for the time being.
            InputError: refused, or not a Redis-protocol server.
        """
        return until_served(partial(self._connect, timeout_s), timeout_s)

    def _connect(self, timeout_s: float) -> Link:
        connection = bounded(self.connection_class)(**self._connection_settings(timeout_s))
        with self.refusals(timeout_s, connection.disconnect):
            connection.connect()
            # A server that needs a password accepts the connection and refuses the first command.
            connection.send_command("PING", check_health=False)
            if connection.read_response() != b"PONG":
                raise redis.ConnectionError("it did not answer PING with PONG")
        return Link(connection._sock.raw, self.endpoint, connection.disconnect)

    @property
    def database(self) -> int:
        """Number of the database."""
        return int(self.settings["db"])

    def infos(
        self, timeout_s: float, *, with_fsync: bool = False, replayed: Sequence[KeyCommand] = ()
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """(endpoint, INFO) of this server, as a list with one element.

        Args:
            timeout_s: limit of every command.
            with_fsync: add the server's appendfsync.
            replayed: commands about the default user, for a server whose restart can drop transactions
                (`bagpipe.store.redis.server_versions`) and a job with a user of its own. Their replies are added as
                ``answers``: None if the user may not ask.

        Raises:
            InputError: as for `admin`, or the server is a cluster node.
        """
        info = self.info(timeout_s, with_fsync=with_fsync, replayed=replayed)
        if info_number(self.endpoint, info, "cluster_enabled"):
            raise InputError(
                f"store {self.endpoint} is a node of a cluster, expected a server on its own; "
                "use redis+cluster:// instead"
            )
        return [(self.endpoint, info)]

    def info(
        self, timeout_s: float, *sections: str, with_fsync: bool = False, replayed: Sequence[KeyCommand] = ()
    ) -> dict[str, Any]:
        """INFO, see `infos`. `sections`: names of its parts; none: the usual ones."""
        ask = partial(self._info, timeout_s, sections=sections, with_fsync=with_fsync, replayed=replayed)
        return until_served(ask, timeout_s)

    def _info(
        self, timeout_s: float, *, sections: Sequence[str], with_fsync: bool, replayed: Sequence[KeyCommand]
    ) -> dict[str, Any]:
        with self.admin(timeout_s) as client:
            info = dict(client.info(*sections))
            if with_fsync:
                try:
                    answer = client.execute_command("CONFIG GET", "appendfsync")
                except redis.ResponseError as error:
                    if is_passing_error(error):
                        raise
                    raise InputError(
                        f"store {self.endpoint} does not tell its appendfsync, which store.durability needs to know: "
                        f"grant the user +config|get, or set store.durability = memory ({error})"
                    ) from error
                info["appendfsync"] = next((_text(value) for value in answer.values()), "unknown")
            # The rights of a job without a user of its own are those of the default user.
            if replayed and drops_transactions(info) and self.settings.get("username") not in (None, "", "default"):
                answers = send_commands(client, replayed)
                refusal = next((answer for answer in answers if isinstance(answer, Exception)), None)
                if refusal is not None and is_passing_error(refusal):
                    raise refusal
                info["answers"] = answers if refusal is None else None  # no right, or a server older than Redis 7
        return info

    @contextmanager
    def session(self, timeout_s: float) -> Iterator[ServerSession]:
        """A session for commands on single keys; errors become `InputError`."""
        with self.admin(timeout_s) as client:
            yield ServerSession(self, client, timeout_s)

    @contextmanager
    def admin(self, timeout_s: float, *, client_class: type[redis.Redis] = redis.Redis) -> Iterator[redis.Redis]:
        """A redis-py client for a few commands; errors become `InputError`."""
        connection_class = bounded(self.connection_class)
        pool = ConnectionPool(connection_class=connection_class, **self._connection_settings(timeout_s))
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
            "parser_class": _RESP2Parser,
        }

    @contextmanager
    def refusals(self, timeout_s: float, cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn redis-py's errors into a one-line `InputError` that names the server and the fix."""
        try:
            yield
        except (InputError, StoreError):
            cleanup()
            raise
        except (redis.RedisError, OSError, *_UNREADABLE) as error:
            cleanup()
            if is_passing_error(error):
                raise NotNow(f"store {self.endpoint}: the server answered: {with_remedy(line_of(error))}") from error
            kind = Unreachable if _is_unreachable(error) else InputError
            advice = _advice(error, self.connection_class)
            raise kind(f"store {self.endpoint}: {_explain(error, timeout_s)}{advice}") from error
        except BaseException:
            cleanup()
            raise


class ServerSession:
    """Runs commands on one server; the counterpart of `ClusterSession`."""

    def __init__(self, server: Server, client: redis.Redis, timeout_s: float) -> None:
        self._server = server
        self._client = client
        self._timeout_s = timeout_s

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """Return `call(client)`; may call it more than once."""
        return until_served(partial(self._run, call), self._timeout_s)

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Replies in order; commands are pipelined. A command may run more than once."""
        answers: list[Any] = []
        for start in range(0, len(commands), PIPELINE_COMMANDS):
            part = commands[start : start + PIPELINE_COMMANDS]
            answers += until_served(partial(self._run, partial(_replies, commands=part)), self._timeout_s)
        return answers

    def _run(self, call: Callable[[redis.Redis], T]) -> T:
        with self._server.refusals(self._timeout_s):
            return call(self._client)


def _replies(client: redis.Redis, commands: Sequence[KeyCommand]) -> list[Any]:
    """Replies to commands. Raises the first error among them."""
    answers = send_commands(client, commands)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def send_commands(client: redis.Redis, commands: Sequence[KeyCommand]) -> list[Any]:
    """Send commands in one pipeline. Returns the replies, with errors among them.

    Raises:
        redis.InvalidResponse: a reply is not of its command's form.
    """
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command.words)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
    for command, answer in zip(commands, answers, strict=True):
        if not isinstance(answer, Exception):
            command.check(answer)
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
            return explanation.format(text=with_remedy(text), timeout_s=timeout_s)
    return f"an answer that cannot be decoded ({type(error).__name__}: {text})"


def _advice(error: Exception, connection_class: type[AbstractConnection]) -> str:
    """Advice for a likely mismatch of TLS and plain connections."""
    text = str(error)
    # A TLS server closes plain connections; a plain server waits for the rest of a line.
    if connection_class is Connection and ("reset by peer" in text or "closed by server" in text):
        return "; if it speaks TLS, the URL begins with rediss"
    if connection_class is SSLConnection and isinstance(error, redis.TimeoutError) and "connecting" in text:
        return _NO_TLS
    return ""


def _tls_cause(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that caused redis-py's error, if any."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


#: What redis-py raises while it decodes a reply of an unexpected form, or with text that is no number.
_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError)

_NO_TLS = "; does the server speak TLS on this port?"

#: OpenSSL's verify codes 18 to 21: self-signed, or no trusted issuer (X509_V_ERR_*, x509_vfy.h).
_UNKNOWN_ISSUER = range(18, 22)

#: First match wins, so subclasses precede their bases.
_EXPLANATIONS: tuple[tuple[type[Exception], str], ...] = (
    (
        NoPermissionError,
        "the user of store.url may not run a command that is needed: {text}; docs/store.md lists the rights",
    ),
    (
        redis.AuthenticationError,
        "user or password refused: check both in store.url, and the password in store.password_file or "
        "BAGPIPE_STORE_PASSWORD ({text})",
    ),
    (redis.TimeoutError, "no answer within store.timeout_s = {timeout_s:g} s ({text})"),
    (ReplyTooLarge, "{text}"),
    (redis.InvalidResponse, "expected a Redis-protocol server, got another protocol ({text})"),
    (redis.ConnectionError, "cannot be reached: {text}"),
    (OSError, "cannot be reached: {text}"),
    (redis.ResponseError, "the server answered: {text}"),
)
