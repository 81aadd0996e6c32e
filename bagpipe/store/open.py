"""`open_store`: the store for a URL. Each store is imported on first use, so one needs no package of another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.store.interface import Store
from bagpipe.types.schema import RowSchema

__all__ = ["SCHEMES", "open_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    url: str
    namespace: str
    schema: RowSchema
    num_buckets: int
    timeout_s: float
    durability: str


def _memory(request: _Request) -> Store:
    from bagpipe.store.memory.store import MemoryStore

    if request.durability != "memory":
        raise InputError(f"store.durability is {request.durability}, but memory:// keeps rows in this process only")

    name = request.url.removeprefix("memory://")
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", name):
        raise InputError(f"store.url: expected memory:// or memory://NAME of letters, digits, _.-, got {request.url!r}")
    return MemoryStore(request.schema, name=name, namespace=request.namespace, num_buckets=request.num_buckets)


def _redis(request: _Request) -> Store:
    try:
        from bagpipe.store.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise InputError(
            "store.url needs the Python package redis, which is not installed: pip install redis"
        ) from None

    return RedisStore(
        request.url,
        schema=request.schema,
        namespace=request.namespace,
        num_buckets=request.num_buckets,
        timeout_s=request.timeout_s,
        durability=request.durability,
    )


#: URL scheme to constructor.
SCHEMES: dict[str, Callable[[_Request], Store]] = {
    "memory": _memory,
    "redis": _redis,
    "rediss": _redis,
    "redis+cluster": _redis,
    "rediss+cluster": _redis,
    "unix": _redis,
}


def open_store(
    url: str,
    *,
    namespace: str,
    schema: RowSchema,
    buckets: int = 64,
    timeout_s: float = 30.0,
    durability: str = "memory",
) -> Store:
    """The store of a URL, not entered yet.

    Args:
        url: memory://[NAME]; redis://, rediss:// or unix://, several servers separated by commas; or
            redis+cluster:// or rediss+cluster:// with nodes separated by commas.
        namespace: prefix of all keys.
        schema: what the rows mean.
        buckets: bucket hashes of the namespace, a power of two.
        timeout_s: deadline of one batch of requests.
        durability: memory, everysec or always; entering the store refuses a less durable server.

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
    makers = {SCHEMES[scheme] for scheme in schemes}
    if len(makers) > 1:
        raise InputError("store.url must name one kind of store, got memory:// and servers")
    (make,) = makers
    return make(
        _Request(
            url=url,
            namespace=namespace,
            schema=schema,
            num_buckets=buckets,
            timeout_s=timeout_s,
            durability=durability,
        )
    )
