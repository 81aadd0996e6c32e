"""`with_password`: the password of the store's user, put into `store.url`. Pure."""

from __future__ import annotations

import re
from urllib.parse import quote

from bagpipe.errors import InputError

__all__ = ["with_password"]

#: The start of a URL up to its host, in a list of URLs; a user may be named there.
_START = re.compile(r"(?P<before>(?:^|,)\s*(?P<scheme>[a-z][a-z+]*)://)(?:(?P<user>[^@/?,]*)@)?")


def with_password(url: str, password: str) -> str:
    """The URL with a password, in each of a list of servers.

    Args:
        url: `store.url`: ``redis://[user@]host``, ``rediss``, ``unix``, ``redis+cluster``, or several of them.
        password: as it is, not percent-encoded; empty: the URL stays as it is.

    Raises:
        InputError: the URL has a password already, or is no server's. The line shows neither.
    """
    if not password:
        return url

    def start(match: re.Match[str]) -> str:
        user = match["user"] or ""
        if ":" in user:
            raise InputError("store.url holds a password, and store.password_file or BAGPIPE_STORE_PASSWORD another")
        if match["scheme"] == "memory":
            raise InputError("store.url is memory://, which has no password")
        return f"{match['before']}{user}:{quote(password, safe='')}@"

    if re.search(r"[?&]password=", url):
        raise InputError("store.url holds a password, and store.password_file or BAGPIPE_STORE_PASSWORD another")
    changed, num_servers = _START.subn(start, url)
    if not num_servers:
        raise InputError(
            "store.url must begin with redis://, rediss://, unix:// or a cluster's scheme to get a password"
        )
    return changed
