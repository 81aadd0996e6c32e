"""The section `cacher` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bagpipe.config.ranges import ABOVE_0, SHARDS, matching

__all__ = ["Assignment", "CacherConfig"]

Assignment = Literal["contiguous", "locality"]


@dataclass(frozen=True, kw_only=True)
class CacherConfig:
    """The Oracle Cacher.

    Attributes:
        url: address of a running cacher, unix:PATH, HOST:PORT (also grpc://) or grpcs://HOST:PORT (TLS); empty: the
            job starts its own.
        assign: assignment of examples to ranks: contiguous, or locality (to the rank that last used their rows).
        shards: processes that index for the cacher, each some tables (docs/scale.md): a number that it starts itself,
            or addresses of running cachers with the same settings; empty: it indexes alone.
        shard_tables: by shard, the data's tables that it gets, joined by +; those not named go to the shard with fewest
            ids so far.
        secret_file: file with the secret shared with a cacher that listens on a network; other users must not be able
            to read it. Empty: the variable BAGPIPE_CACHER_SECRET, if it is set.
        tls_ca: file with the certificate authority that signed a grpcs:// cacher's certificate; empty: the system's.
        tls_cert: file with this client's certificate, for a cacher that requires one.
        tls_key: file with its key.
        timeout_s: deadline for connecting to a cacher, and for reconnecting after a lost connection.
    """

    url: Annotated[
        str,
        matching(
            r"|unix:.+|(grpcs?://)?[^/]+:\d{1,5}", "empty, unix:PATH, HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
        ),
    ] = ""
    assign: Assignment = "contiguous"
    shards: Annotated[tuple[str, ...], SHARDS] = ()
    shard_tables: tuple[str, ...] = ()
    secret_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    timeout_s: Annotated[float, ABOVE_0] = 60.0
