"""Parses `store.url` into servers. The only I/O: checks that certificate files exist.

    redis://, rediss://, unix://, several with commas     ──parse_urls────────> the servers, in order
    redis+cluster://, rediss+cluster://  host:port[,...]  ──parse_cluster_url─> nodes to ask for the rest of the cluster

Messages never contain a password.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

from bagpipe.errors import InputError
from bagpipe.store.redis.cluster_routing import Address
from bagpipe.store.redis.servers import Server
from bagpipe.util.redaction import OPEN_OPTIONS, redact

__all__ = ["is_cluster_url", "parse_cluster_url", "parse_urls", "server_at"]

_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
#: Supported query options of a URL, with redis-py's names.
_QUERY_OPTIONS = OPEN_OPTIONS | {"password"}
#: A comma starts another URL only before a scheme, so a socket path can contain commas.
_NEXT_URL = re.compile(r",\s*(?=[a-z][a-z+]*://)")
_CLUSTER = re.compile(r"(rediss?)\+cluster://(?:(?P<user>.*)@)?(?P<hosts>[^/?]*)(?P<rest>.*)", re.DOTALL)


def is_cluster_url(urls: str) -> bool:
    """Whether the URL names a cluster rather than a list of servers."""
    return _CLUSTER.match(urls.strip()) is not None


def parse_urls(urls: str) -> tuple[Server, ...]:
    """Servers of a comma-separated URL list: redis://, rediss:// and unix://.

    Raises:
        InputError: a malformed URL, a duplicate, or a cluster in a list.
    """
    parts = [url.strip() for url in _NEXT_URL.split(urls)]
    if clusters := [url for url in parts if is_cluster_url(url)]:
        raise InputError(f"store.url: {redact(clusters[0])} is a cluster of its own and cannot stand in a list")
    servers = tuple(_parse_one(url, redact(url)) for url in parts)
    for number, server in enumerate(servers):
        if any(server.settings == other.settings for other in servers[:number]):
            raise InputError(f"store.url names a server twice: {server.endpoint}")
    return servers


def parse_cluster_url(url: str) -> tuple[Server, ...]:
    """The nodes of a redis+cluster:// URL (rediss+cluster:// with TLS), all with the same user and options.

    Raises:
        InputError: a malformed URL, a database, a socket, or a duplicate node.
    """
    url = url.strip()
    match, endpoint = _CLUSTER.fullmatch(url), redact(url)
    if match is None or _NEXT_URL.search(url):
        raise InputError(f"store.url: {endpoint} must be one redis+cluster://host:port[,host:port...] URL")
    login = f"{match['user']}@" if match["user"] is not None else ""
    nodes: dict[Address, Server] = {}
    for host in match["hosts"].split(","):
        if not host.strip():
            raise InputError(f"store.url: {endpoint} must name host:port, separated by commas")
        server = _parse_one(f"{match[1]}://{login}{host.strip()}{match['rest']}", endpoint)
        if server.settings["db"] != 0:
            raise InputError(f"store.url: {endpoint} names database {server.settings['db']}, a cluster has only 0")
        address = Address(server.settings.get("host", "localhost"), server.settings.get("port", 6379))
        if address in nodes:
            raise InputError(f"store.url names a node twice: {address} in {endpoint}")
        nodes[address] = server_at(server, address)
    return tuple(nodes.values())


def server_at(server: Server, address: Address) -> Server:
    """The cluster node at another address, with the same user and options."""
    is_tls = server.connection_class is not Connection
    return Server(
        endpoint=f"redis{'s' if is_tls else ''}+cluster://{address}",
        settings=server.settings | {"host": address.host, "port": address.port},
        connection_class=server.connection_class,
    )


def _parse_one(url: str, endpoint: str) -> Server:
    try:
        parts = urlsplit(url)
        if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("special characters in user and password must be percent-encoded")
        database = parts.path.strip("/") if parts.scheme != "unix" else ""
        if database and not database.isdigit():
            raise InputError(f"store.url: the path of {endpoint} must be a database number, got {database!r}")
        if parts.scheme == "unix" and not parts.path:
            raise InputError(f"store.url: {endpoint} names no socket, expected unix:///path/to/socket")
        unknown = sorted({name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - _QUERY_OPTIONS)
        if unknown:
            raise InputError(
                f"store.url: {endpoint} has the option {unknown[0]!r}, "
                f"known options: {', '.join(sorted(_QUERY_OPTIONS))}"
            )
        settings = dict(parse_url(url))
        settings["db"] = int(settings.get("db", 0))
        if "path" in settings:  # of any bytes
            settings["path"] = unquote(parts.path, errors="surrogateescape")
    except ValueError as error:
        # The unreadable part can be a part of the password.
        detail = str(error) if url == redact(url) or "percent-encoded" in str(error) else "is it percent-encoded?"
        raise InputError(f"store.url: {endpoint} cannot be read: {detail}") from None
    for option in _FILE_OPTIONS:
        if option in settings and not Path(settings[option]).is_file():
            raise InputError(f"store.url: {option} of {endpoint} names no file: {settings[option]}")
    connection_class: type[AbstractConnection] = settings.pop("connection_class", Connection)
    return Server(endpoint=endpoint, settings=settings, connection_class=connection_class)
