"""`KeyStore`: client of the job's key-value store with a deadline per request; `connect`: its torch client.

    caller ──request──> the client's own thread ──> store     no response in time: the store counts as gone for good

torch's store client blocks as long as its TCP connection lasts. After a silent host failure the connection closes only
after about 15 minutes (tcp_retries2). Only the client's daemon thread blocks that long.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from bagpipe.distributed.membership import Membership

__all__ = ["KeyStore", "connect"]


class _Request:
    """A call and its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.value: Any = None
        self.error: RuntimeError | None = None


class KeyStore:
    """Thread-safe context manager with methods of `torch.distributed.Store`.

    Args:
        store: the torch client; used by this object only.
        timeout_s: deadline of a response.

    Raises:
        RuntimeError: in every method: the store is gone.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._is_gone = False
        # Bounded by the number of threads: each waits for the response to its request.
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="bagpipe-keystore", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)
        if not self._is_gone:
            self._thread.join(timeout=self._timeout_s)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that exists. A missing key blocks until the deadline."""
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._call(lambda: self._store.check(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value, or is missing and `expected` is ""; returns the resulting value."""
        result: bytes = self._call(lambda: self._store.compare_set(key, expected, value))
        return result

    def _call(self, call: Callable[[], Any]) -> Any:
        if self._is_gone:
            raise RuntimeError("the key-value store did not answer an earlier request")
        request = _Request(call)
        self._requests.put(request)
        if not request.done.wait(self._timeout_s):
            self._is_gone = True
            raise RuntimeError(f"no answer from the key-value store within {self._timeout_s:g} s")
        if request.error is not None:
            raise request.error
        return request.value

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.value = request.call()
            except RuntimeError as error:
                request.error = error
            request.done.set()


def connect(membership: Membership, *, is_master: bool, timeout_s: float, job: int = 0) -> Any:
    """Connect to the job's store.

    Args:
        membership: names the store. Its attempt is the prefix of all keys.
        is_master: host the store in this process.
        timeout_s: deadline of the connection.
        job: number of the job in its processes, from 0; the same on all ranks.

    Returns:
        A `torch.distributed.PrefixStore`.

    Raises:
        RuntimeError: no store answers in time.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # takes seconds; an error line does not wait for it

    store = TCPStore(
        membership.address,
        membership.port,
        membership.world_size,
        is_master,
        timedelta(seconds=timeout_s),
        multi_tenant=True,
        wait_for_workers=False,
    )
    later = f"/job_{job}" if job else ""
    return PrefixStore(f"bagpipe/attempt_{membership.attempt}{later}", store)
