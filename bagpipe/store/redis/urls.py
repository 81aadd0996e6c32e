"""`store.url` to servers. Pure but for looking whether named certificate files exist.

    redis://, rediss://, unix://, several with commas     ──parse_urls────────> the servers, in order
    redis+cluster://, rediss+cluster://  host:port[,...]  ──parse_cluster_url─> nodes to ask for the rest of the cluster

No message shows a password.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

from bagpipe.errors import InputError
from bagpipe.store.redis.cluster_routing import Address
from bagpipe.store.redis.servers import Server

__all__ = ["is_cluster_url", "parse_cluster_url", "parse_urls", "redact", "server_at"]

_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
#: Options of a URL's query that mean something here; redis-py's own names. Others would break what we rely on.
_QUERY_OPTIONS = frozenset({"db", "username", "password", "ssl_cert_reqs", "ssl_check_hostname", *_FILE_OPTIONS})
_HIDDEN = "***"
#: The value of any option that is not known to be harmless: `passwrod=` holds a password too.
_SECRET_OPTION = re.compile(rf"([?&](?!(?:{'|'.join(sorted(_QUERY_OPTIONS - {'password'}))})=)[^=&]*=)[^&]*")
#: A comma starts another URL only where a scheme follows, so a socket path may hold commas.
_NEXT_URL = re.compile(r",\s*(?=[a-z][a-z+]*://)")
_CLUSTER = re.compile(r"(rediss?)\+cluster://(?:(?P<user>.*)@)?(?P<hosts>[^/?]*)(?P<rest>.*)", re.DOTALL)


def redact(url: str) -> str:
    """The URL with its password, wherever it stands, replaced by stars. Never raises."""
    # By pattern, not by parsing: a URL that cannot be parsed is the one that ends up in a message. Up to the last
    # @, since a password that was not percent-encoded may hold one.
    url = re.sub(r"(://[^:@/]*:).*@", rf"\1{_HIDDEN}@", url, flags=re.DOTALL)
    return _SECRET_OPTION.sub(rf"\1{_HIDDEN}", url)


def is_cluster_url(urls: str) -> bool:
    """A cluster is meant, rather than a list of servers."""
    return _CLUSTER.match(urls.strip()) is not None


def parse_urls(urls: str) -> tuple[Server, ...]:
    """Servers of a comma-separated URL list: redis://, rediss:// and unix://.

    Raises:
        InputError: a URL cannot be read, or one appears twice, or a cluster stands among them.
    """
    parts = [url.strip() for url in _NEXT_URL.split(urls)]
    if clusters := [url for url in parts if is_cluster_url(url)]:
        raise InputError(f"store.url: {redact(clusters[0])} is a cluster of its own and cannot stand in a list")
    servers = tuple(_parse_one(url, redact(url)) for url in parts)
    for number, server in enumerate(servers):
        if any(server.settings == other.settings for other in servers[:number]):
            raise InputError(f"store.url names a server twice: {server.place}")
    return servers


def parse_cluster_url(url: str) -> tuple[Server, ...]:
    """The nodes that redis+cluster:// (rediss+cluster:// with TLS) names, all with the same user and options.

    Raises:
        InputError: the URL cannot be read, or names a database, a socket or a node twice.
    """
    url = url.strip()
    match, place = _CLUSTER.fullmatch(url), redact(url)
    if match is None or _NEXT_URL.search(url):
        raise InputError(f"store.url: {place} must be one redis+cluster://host:port[,host:port...] URL")
    login = f"{match['user']}@" if match["user"] is not None else ""
    nodes: dict[Address, Server] = {}
    for host in match["hosts"].split(","):
        if not host.strip():
            raise InputError(f"store.url: {place} must name host:port, separated by commas")
        server = _parse_one(f"{match[1]}://{login}{host.strip()}{match['rest']}", place)
        if server.settings["db"] != 0:
            raise InputError(f"store.url: {place} names database {server.settings['db']}, a cluster has only 0")
        address = Address(server.settings.get("host", "localhost"), server.settings.get("port", 6379))
        if address in nodes:
            raise InputError(f"store.url names a node twice: {address} in {place}")
        nodes[address] = server_at(server, address)
    return tuple(nodes.values())


def server_at(server: Server, address: Address) -> Server:
    """A cluster's node at another address, reached with the same user and options."""
    is_tls = server.connection_class is not Connection
    return Server(
        place=f"redis{'s' if is_tls else ''}+cluster://{address}",
        settings=server.settings | {"host": address.host, "port": address.port},
        connection_class=server.connection_class,
    )


def _parse_one(url: str, place: str) -> Server:
    try:
        parts = urlsplit(url)
        if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("special characters in user and password must be percent-encoded")
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
        # What cannot be read may be a part of the password.
        detail = str(error) if url == redact(url) or "percent-encoded" in str(error) else "is it percent-encoded?"
        raise InputError(f"store.url: {place} cannot be read: {detail}") from None
    for option in _FILE_OPTIONS:
        if option in settings and not Path(settings[option]).is_file():
            raise InputError(f"store.url: {option} of {place} names no file: {settings[option]}")
    connection_class: type[AbstractConnection] = settings.pop("connection_class", Connection)
    return Server(place=place, settings=settings, connection_class=connection_class)
