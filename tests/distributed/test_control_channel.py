from __future__ import annotations

import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from bagpipe.distributed.control_channel import ControlChannel
from bagpipe.distributed.failure import Failures, Watcher
from bagpipe.errors import InputError, PeerError


def two_ranks(silence_s: float) -> tuple[list[Failures], list[ControlChannel]]:
    store = HashStore()
    failures = [Failures(store, rank, 2) for rank in range(2)]
    return failures, [
        ControlChannel(store, failures[rank], rank=rank, world_size=2, silence_s=silence_s) for rank in range(2)
    ]


def test_rank_0_takes_longer_than_any_deadline() -> None:
    failures, (first, second) = two_ranks(silence_s=3)
    with Watcher(failures[0], lambda error: None):
        timer = threading.Timer(3.5, first.share, ({"digest": "ab"},))
        timer.start()
        assert second.share(None) == {"digest": "ab"}
        timer.join()
    first.share([1, 2])
    assert second.share(None) == [1, 2]


def test_a_silent_rank_0_is_an_error() -> None:
    _, (_, second) = two_ranks(silence_s=0.2)
    with pytest.raises(PeerError, match=r"lost rank 0, dead or stopped \(no sign of life for 0.2 s\)"):
        second.share(None)


def test_a_failure_ends_the_wait() -> None:
    failures, (_, second) = two_ranks(silence_s=60)
    failures[0].report(InputError("no such file"))
    with pytest.raises(InputError, match="rank 0: no such file"):
        second.share(None)


def test_every_rank_gets_every_value() -> None:
    _, words = two_ranks(silence_s=60)
    received: list[Any] = [None, None]

    def speak(rank: int) -> None:
        received[rank] = [words[rank].gather({"rank": rank}), words[rank].share(rank), words[rank].gather([None, "ü"])]

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == [[[{"rank": 0}, {"rank": 1}], 0, [[None, "ü"]] * 2]] * 2


def test_a_silent_rank_is_named() -> None:
    _, (first, _) = two_ranks(silence_s=0.2)
    with pytest.raises(PeerError, match=r"lost rank 1, dead or stopped"):
        first.gather(1)


def test_a_failed_rank_does_not_wait() -> None:
    failures, (_, second) = two_ranks(silence_s=60)
    failures[1].report(InputError("no such file"))
    with pytest.raises(PeerError, match="this rank has failed"):
        second.gather(None)


class _GoneStore:
    def __getattr__(self, name: str) -> object:
        def fail(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


def test_a_store_that_is_gone() -> None:
    store = _GoneStore()
    with pytest.raises(PeerError, match="lost the job's key-value store"):
        ControlChannel(store, Failures(store, 1, 2), rank=1, world_size=2, silence_s=60).share(None)
