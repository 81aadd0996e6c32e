"""`Cacher`: which cacher a program uses, and how it proves that it may. Opens nothing."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from bagpipe.client.address import Address, parse_address
from bagpipe.errors import InputError

__all__ = ["Cacher"]


@dataclass(frozen=True, slots=True)
class Cacher:
    """A running cacher, ``python -m cacher``. Rank 0 alone connects to it, and reads the files.

    Attributes:
        url: ``unix:PATH``, ``HOST:PORT``, ``grpc://HOST:PORT``, or ``grpcs://HOST:PORT`` for TLS.
        secret_file: file with the secret shared with the cacher (its ``--secret-file``).
        tls_ca: file with the certificate authority that signed the cacher's certificate (PEM); empty: the system's.
        tls_cert, tls_key: files with this program's certificate and key (PEM), for a cacher that requires one.
        timeout_s: how long to try to reach it.

    Raises:
        InputError: the address has another form, or the timeout is not above 0.
    """

    url: str
    _: KW_ONLY
    secret_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.address()
        if not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise InputError(f"timeout_s must be a number of seconds above 0, got {self.timeout_s!r}")

    def address(self) -> Address:
        """The address, parsed."""
        return parse_address(self.url, subject="the address of a cacher")
