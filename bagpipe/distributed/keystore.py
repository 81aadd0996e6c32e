"""`KeyStore`: a client of the job's key-value store whose every answer has a deadline.

    caller ──question──> thread of the client's own ──> store     no answer in time: the store counts as gone, for good

A store client of torch's waits as long as its connection lasts, and a host that vanishes without a word takes that with
it only after a quarter of an hour (tcp_retries2). The thread that waits then is a daemon, and nobody else's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

__all__ = ["KeyStore"]


class _Question:
    """A call, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.answered = threading.Event()
        self.value: Any = None
        self.error: RuntimeError | None = None


class KeyStore:
    """Context manager. Methods are those of `torch.distributed.Store`; any thread may call them.

    Args:
        store: the client; used by nobody else.
        timeout_s: deadline of an answer.

    Raises:
        RuntimeError: in every method, the store is gone.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._is_gone = False
        # Bounded by nature: one question per thread that waits for its answer.
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="bagpipe-keystore", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._questions.put(None)
        if not self._is_gone:
            self._thread.join(timeout=self._timeout_s)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is known to be there: a missing one would be waited for."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value, or is missing and "" is expected; its value afterwards."""
        found: bytes = self._ask(lambda: self._store.compare_set(key, expected, value))
        return found

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self._is_gone:
            raise RuntimeError("the key-value store has not answered before")
        question = _Question(call)
        self._questions.put(question)
        if not question.answered.wait(self._timeout_s):
            self._is_gone = True
            raise RuntimeError(f"no answer from the key-value store within {self._timeout_s:g} s")
        if question.error is not None:
            raise question.error
        return question.value

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.value = question.call()
            except RuntimeError as error:
                question.error = error
            question.answered.set()
