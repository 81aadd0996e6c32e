from __future__ import annotations

import threading

import pytest
from torch._C._distributed_c10d import HashStore

from bagpipe.distributed.keystore import KeyStore


def test_it_returns_the_stores_answers(no_leaks: None) -> None:
    with KeyStore(HashStore(), 30.0) as store:
        assert not store.check(["a"])
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert store.compare_set("b", "", "2") == b"2"
        assert store.compare_set("b", "", "3") == b"2"
        assert store.check(["a", "b"])
        assert not store.check(["a", "c"])


class _Hanging:
    """A TCPStore on a vanished host; its calls return at the end of the test."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.let_go.wait()
        return True

    def get(self, key: str) -> bytes:
        raise RuntimeError("Connection reset by peer")


def test_a_missing_answer_is_a_permanent_error(no_leaks: None) -> None:
    hanging = _Hanging()
    with KeyStore(hanging, 0.1) as store:
        with pytest.raises(RuntimeError, match=r"no answer from the key-value store within 0.1 s"):
            store.check(["a"])
        with pytest.raises(RuntimeError, match="did not answer an earlier request"):
            store.set("a", "1")
        hanging.let_go.set()
    store._thread.join()


def test_an_error_of_the_keystore_is_raised(no_leaks: None) -> None:
    with KeyStore(_Hanging(), 30.0) as store, pytest.raises(RuntimeError, match="Connection reset by peer"):
        store.get("a")
