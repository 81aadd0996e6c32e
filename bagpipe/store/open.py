"""`open_store`: the store for a URL. Each store is imported on first use, so one needs no package of another."""

from __future__ import annotations

import re
from collections.abc import Callable

from bagpipe.errors import InputError
from bagpipe.store.interface import Store
from bagpipe.types.schema import RowSchema
from bagpipe.util.packages import missing_line
from bagpipe.util.redaction import redact

__all__ = ["SCHEMES", "open_store"]

#: URL schemes of `store.url`.
SCHEMES = ("memory", "redis", "rediss", "redis+cluster", "rediss+cluster", "unix")


def open_store(
    url: str,
    *,
    namespace: str,
    schema: RowSchema,
    buckets: int = 64,
    timeout_s: float = 30.0,
    durability: str = "memory",
    client: str = "thread",
) -> Store:
    """The store of a URL, not entered yet.

    Args:
        url: memory://[NAME]; redis://, rediss:// or unix://, several servers separated by commas; or
            redis+cluster:// or rediss+cluster:// with nodes separated by commas.
        namespace: prefix of all keys.
        schema: tables, row widths and dtype.
        buckets: bucket hashes of the namespace, a power of two.
        timeout_s: deadline of one batch of requests.
        durability: memory, everysec or always; entering the store refuses a less durable server.
        client: where rows are encoded, sent, received and decoded: in the calling ``thread``, or in a ``process`` of
            its own (`bagpipe.store.process`).

    Raises:
        InputError: an unknown scheme, or an argument that the store refuses.
    """
    schemes = re.findall(r"(?:^|,)\s*([^:,/]*)://", url) or [url]
    for scheme in schemes:
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise InputError(
                f"store.url must begin with one of {known}; got {scheme + '://' if '://' in url else '...'!r}"
            )
    if set(schemes) == {"memory"}:
        if client != "thread":
            raise InputError(f"store.client is {client}, but memory:// keeps rows in the training process")
        return _open_memory(url, namespace, schema, buckets, durability)
    if "memory" in schemes:
        raise InputError("store.url must name one kind of store, got memory:// and servers")
    try:
        from bagpipe.store.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise InputError(f"store.url names servers: {missing_line(['redis'])}") from None
    make: Callable[..., Store] = RedisStore
    if client == "process":
        from bagpipe.store.process.store import ProcessStore

        make = ProcessStore
    return make(
        url, schema=schema, namespace=namespace, num_buckets=buckets, timeout_s=timeout_s, durability=durability
    )


def _open_memory(url: str, namespace: str, schema: RowSchema, buckets: int, durability: str) -> Store:
    from bagpipe.store.memory.store import MemoryStore

    if durability != "memory":
        raise InputError(f"store.durability is {durability}, but memory:// keeps rows in this process only")
    name = url.removeprefix("memory://")
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", name):
        raise InputError(f"store.url: expected memory:// or memory://NAME of letters, digits, _.-, got {redact(url)!r}")
    return MemoryStore(schema, name=name, namespace=namespace, num_buckets=buckets)
