"""Addresses of cachers: ``unix:PATH``, ``HOST:PORT``, ``grpc://HOST:PORT``, ``grpcs://HOST:PORT`` (TLS). Pure."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import quote_from_bytes

from bagpipe.errors import InputError
from bagpipe.util.redaction import redact
from bagpipe.util.temporary_folder import MAX_SOCKET_PATH_BYTES

__all__ = ["Address", "parse_address"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a cacher's listener.

    Attributes:
        path: of a unix socket; empty for TCP.
        host, port: of the TCP listener; "" and 0 for a unix socket.
        tls: the listener speaks TLS.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @property
    def target(self) -> str:
        """The address in gRPC's form, to connect to or to listen on."""
        if self.path:
            return f"unix:{quote_from_bytes(os.fsencode(self.path))}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address. A host name other than ``localhost`` counts as remote."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"grpcs://{self.target}" if self.tls else self.target


def parse_address(text: str, *, subject: str = "cacher.url", others: str = "") -> Address:
    """Parse an address.

    Args:
        text: one of the forms above.
        subject: name of the setting in errors.
        others: what else the setting can be, for errors: ``"process, "``.

    Raises:
        InputError: unknown form, port out of range, or path too long for a socket.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        path = text.removeprefix("unix:")
        # URLs write unix:///run/x.sock.
        path = path.removeprefix("//") if path.startswith("///") else path
        if (num_bytes := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise InputError(
                f"{subject}: expected a socket path of at most {MAX_SOCKET_PATH_BYTES} bytes, got {num_bytes}"
            )
        if "," in path:  # gRPC takes it for the end of an address
            raise InputError(f"{subject}: expected a socket path without commas, got {path}")
        return Address(path=path)
    match = re.fullmatch(r"(?:(grpcs?)://)?(\[[0-9a-fA-F:.]+\]|[^/\[\]:\s]+):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise InputError(
            f"{subject} must be {others}unix:PATH, HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, "
            f"got {redact(text)!r}"
        )
    return Address(host=match[2].strip("[]"), port=int(match[3]), tls=match[1] == "grpcs")
