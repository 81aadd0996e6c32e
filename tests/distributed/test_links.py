"""Transfers between stages in processes and in threads, and the end of a pipeline whose rank fails."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from tests.distributed.processes import DEADLINE_S, LONG_DEADLINE_S, Ended, run_peers, run_ranks
from tests.distributed.threads import run_threads

pytestmark = pytest.mark.multiproc

Run = Callable[..., list[Ended]]


def message(sender: int, receiver: int, tag: int, turn: int) -> Tensor:
    """A message of random dtype and shape; empty in some turns."""
    dtype = (torch.float64, torch.int64, torch.bfloat16)[tag % 3]
    shape = ((), (turn % 3, 2), (1, 3, 2))[(tag + turn) % 3]
    return torch.full(shape, 1000 * sender + 100 * receiver + 10 * tag + turn, dtype=dtype)


def talk(peers: Any, num_processes: int) -> list[bool]:
    """All pairs in both directions. Tags and waits are in another order at each end."""
    links = peers.open_links(num_processes)
    position, good = peers.rank % num_processes, []
    first = peers.rank - position
    others = [other for other in range(num_processes) if other != position]
    for _ in range(2):
        pending, expected = [], []
        for tag in (3, 0, 7):
            for turn in range(4):
                for other in others:
                    wanted = message(first + other, peers.rank, tag, turn)
                    taken = torch.zeros_like(wanted)
                    pending.append(links.receive(other, tag, taken))
                    expected.append((taken, wanted))
        for tag in (7, 3, 0):
            for turn in range(4):
                pending += [
                    links.send(other, tag, message(peers.rank, first + other, tag, turn)) for other in reversed(others)
                ]
        for transfer in reversed(pending):
            transfer.wait()
            transfer.wait()  # harmless
        good += [torch.equal(taken, wanted) for taken, wanted in expected]
    return good


@pytest.mark.parametrize("run", [run_peers, run_threads])
@pytest.mark.parametrize(("world_size", "num_processes"), [(2, 2), (4, 2), (3, 3)])
def test_all_lanes_transfer_data(run: Run, world_size: int, num_processes: int) -> None:
    for end in run(world_size, talk, num_processes):
        assert end.error is None
        assert len(end.value) == 2 * 3 * 4 * (num_processes - 1)
        assert all(end.value)


def large_and_late(peers: Any) -> list[bool]:
    """More data than the connection buffers, in both directions; the sender starts long before the receiver."""
    links = peers.open_links(2)
    other = 1 - peers.rank
    given, taken = torch.full((1 << 20,), float(peers.rank)), torch.empty(1 << 20)
    sent = links.send(other, 1, given)
    peers.gather(None)
    links.receive(other, 1, taken).wait()
    sent.wait()
    return [bool((taken == other).all())]


@pytest.mark.parametrize("run", [run_peers, run_threads])
def test_large_transfers_in_both_directions(run: Run) -> None:
    assert [end.value for end in run(2, large_and_late)] == [[True]] * 2


def one_end_only(peers: Any) -> None:
    links = peers.open_links(2)
    if peers.rank == 0:
        links.receive(1, 5, torch.empty(3)).wait()
    else:
        peers.gather(None)  # waits as long as rank 0 lives


def test_a_silent_peer_is_named() -> None:
    first, second = run_threads(2, one_end_only, timeout_s=0.2)
    assert first.error == ("PeerError", "links: waited for 3 values of rank 1 (tag 5), at most 0.2 s")
    assert second.error is not None
    first, second = run_ranks(2, _in_peers, DEADLINE_S, one_end_only)
    assert first.error is not None
    assert first.error[0] == "PeerError"
    words = (
        "links down lane: waited for rank 1 at the other end of 3 values (tag 5), at most 3 s (run.peer_timeout_s): "
    )
    assert first.error[1].startswith(f"{words}Timed out")
    assert second.error == ("PeerError", f"rank 0: {first.error[1]}")


def _in_peers(membership: Membership, timeout_s: float, work: Callable[..., Any], *args: object) -> Any:
    with TorchPeers(membership, timeout_s=timeout_s) as peers:
        return work(peers, *args)


def shapes_differ(peers: Any) -> None:
    links = peers.open_links(2)
    if peers.rank == 0:
        links.send(1, 0, torch.zeros(3)).wait()
    else:
        links.receive(0, 0, torch.zeros(4)).wait()


def test_threads_detect_a_wrong_shape() -> None:
    assert ("PeerError", "expected shape [4], got [3]") in [end.error for end in run_threads(2, shapes_differ)]


def pipeline(peers: Any, how: str) -> None:
    """Micro-batches run down the ranks and their gradients back; the second rank ends in the middle."""
    links = peers.open_links(peers.world_size)
    rank, last = peers.rank, peers.world_size - 1
    for turn in range(1000):
        if rank == 1 and turn == 3:
            if how == "raise":
                raise InputError("day_3.tsv:7: expected 40 columns, got 39")
            os.kill(os.getpid(), getattr(signal, how))
        value = torch.full((8,), float(turn))
        sent = []
        if rank > 0:
            links.receive(rank - 1, 0, value).wait()
        if rank < last:
            sent.append(links.send(rank + 1, 0, value))
            links.receive(rank + 1, 1, value).wait()
        if rank > 0:
            sent.append(links.send(rank - 1, 1, value))
        for transfer in sent:
            transfer.wait()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGSTOP"])
def test_a_rank_that_ends_in_a_step_ends_all_by_name(world_size: int, how: str) -> None:
    stopped, timeout_s = (1, DEADLINE_S) if how == "SIGSTOP" else (-1, LONG_DEADLINE_S)
    ends = run_ranks(world_size, _in_peers, timeout_s, pipeline, how, stopped=stopped)
    for rank, end in enumerate(ends):
        if rank == 1 and how != "raise":
            assert end.error is None
            assert end.code == -signal.SIGKILL
            continue
        assert end.error is not None
        if how == "raise":
            assert end.error[0] == "InputError"
            assert end.error[1].removeprefix("rank 1: ") == "day_3.tsv:7: expected 40 columns, got 39"
        else:
            assert end.error[0] == "PeerError"
            assert re.search(r"lost rank 1, dead or stopped \(links (up|down) lane: waited for ", end.error[1])


def test_threads_end_together() -> None:
    ends = run_threads(3, pipeline, "raise")
    assert ends[1].error == ("InputError", "day_3.tsv:7: expected 40 columns, got 39")
    for end in (ends[0], ends[2]):
        assert end.error is not None
        assert end.error[1].startswith("another rank failed (links: waited for 8 values of rank 1")


def fail_beside_a_wait(peers: TorchPeers) -> str:
    """Rank 0 reports its own failure from another thread than the one that waits for rank 1."""
    links = peers.open_links(2)
    reported = threading.Event()
    peers.listen(lambda error: reported.set())
    if peers.rank == 1:
        assert reported.wait(LONG_DEADLINE_S)
        return ""
    timer = threading.Timer(0.1, peers.report, (InputError("bad column"),))
    timer.start()
    words = []
    for _ in range(2):  # one started, and one that starts too late
        try:
            links.receive(1, 0, torch.empty(4)).wait()
        except Exception as error:
            words.append(str(error))
    timer.join()
    return " | ".join(words)


def test_a_rank_s_own_failure_ends_its_transfers() -> None:
    ends = run_peers(2, fail_beside_a_wait)
    assert [end.error for end in ends] == [None, None]
    assert ends[0].value == " | ".join(["this rank has failed, so it waits for no other"] * 2)
