"""`Writes`: notifications of a store server's writes. They show that a job in another process is training."""

from __future__ import annotations

from urllib.parse import unquote

import redis

__all__ = ["Writes", "client_of"]


def client_of(url: str) -> redis.Redis:
    """A client of the server behind a unix:// URL."""
    return redis.Redis(unix_socket_path=unquote(url.removeprefix("unix://")), socket_timeout=60)


class Writes:
    """Waits for rows written into a namespace, without polling."""

    def __init__(self, url: str, namespace: str) -> None:
        self._client = client_of(url)
        self._events = self._client.pubsub(ignore_subscribe_messages=True)
        self._events.psubscribe(f"__keyspace@0__:{namespace}:{{*")

    def wait(self, count: int) -> None:
        """Wait for so many writes."""
        seen = 0
        while seen < count:
            message = self._events.get_message(timeout=250)
            if message is None:
                continue  # the acknowledgement of the subscription
            seen += 1

    def close(self) -> None:
        self._events.close()
        self._client.close()
