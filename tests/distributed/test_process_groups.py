"""`TorchPeers` in real processes: transferred data, and the end of a job whose rank fails."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.distributed.interface import StepVote
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError, PeerError, StoreError
from tests.distributed.processes import LONG_DEADLINE_S, run_peers, run_ranks

pytestmark = pytest.mark.multiproc


def rows_between(giver: int, taker: int, turn: int) -> int:
    """Number of rows that one rank sends another in a turn; zero in some turns."""
    return (3 * giver + 5 * taker + turn) % 4 if turn else 0


def exchange_everything(peers: TorchPeers) -> dict[str, Any]:
    """Use all lanes concurrently for several turns. Returns the received data."""
    rank, size = peers.rank, peers.world_size
    good: dict[str, Any] = {}

    def rows(lane: Any) -> None:
        for turn in range(6):
            given = [rows_between(rank, other, turn) for other in range(size)]
            taken = [rows_between(other, rank, turn) for other in range(size)]
            mine = torch.cat([torch.full((n, 3), 100.0 * rank + other) for other, n in enumerate(given)])
            output = torch.full((sum(taken), 3), -1.0)
            peers.exchange(lane, output, mine, taken, given)
            expected = torch.cat([torch.full((n, 3), 100.0 * other + rank) for other, n in enumerate(taken)])
            good[f"{lane} {turn}"] = bool(torch.equal(output, expected))

    def batches() -> None:
        last = rank == size - 1
        votes = [
            StepVote.GO,
            StepVote.END if last else StepVote.GO,
            StepVote.GO,
            StepVote.STOP if last else StepVote.END,
            StepVote.GO,
        ]
        good["agree"] = [int(peers.agree(vote)) for vote in votes]

    def acknowledgements() -> None:
        for _ in range(5):
            peers.acknowledge()

    threads = [threading.Thread(target=rows, args=(lane,)) for lane in ("pull", "push")]
    threads += [threading.Thread(target=batches), threading.Thread(target=acknowledgements)]
    for thread in threads:
        thread.start()
    good["share"] = peers.share({"port": 7 + rank})
    good["gather"] = peers.gather({"rank": rank, "text": "ü" * rank})
    good["scores"] = [part.tolist() for part in peers.collect(torch.arange(float(rank)))]
    good["nothing"] = [part.tolist() for part in peers.collect(torch.zeros(0, dtype=torch.float64))]
    for thread in threads:
        thread.join()
    return good


@pytest.mark.parametrize(("world_size", "hosted_by_rank_0"), [(2, True), (3, False)])
def test_all_lanes_transfer_data(world_size: int, hosted_by_rank_0: bool) -> None:
    for rank, end in enumerate(run_peers(world_size, exchange_everything, hosted_by_rank_0=hosted_by_rank_0)):
        assert end.error is None
        value = end.value
        assert value.pop("agree") == [StepVote.GO, StepVote.END, StepVote.GO, StepVote.STOP, StepVote.GO]
        assert value.pop("share") == {"port": 7}
        assert value.pop("gather") == [{"rank": other, "text": "ü" * other} for other in range(world_size)]
        scores = [list(np.arange(float(other))) for other in range(world_size)]
        assert value.pop("scores") == (scores if rank == 0 else [])
        assert value.pop("nothing") == ([[]] * world_size if rank == 0 else [])
        assert len(value) == 12
        assert all(value.values())
        assert end.threads <= 3, "communicators leave no thread behind"


def fail_on_rank_1(peers: TorchPeers, how: str) -> None:
    for turn in range(1000):
        if peers.rank == 1 and turn == 3:
            if how == "input":
                raise InputError("day_3.tsv:7: expected 40 columns, got 39")
            if how == "store":
                raise StoreError("no answer from 10.0.0.9:6379")
            if how == "exit":
                raise SystemExit(130)
            if how == "leave":
                return
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [1] * peers.world_size
        peers.exchange("pull", torch.empty(peers.world_size, 2), torch.zeros(peers.world_size, 2), rows, rows)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("input", "InputError", "rank 1: day_3.tsv:7: expected 40 columns, got 39"),
        ("store", "PeerError", "rank 1: no answer from 10.0.0.9:6379"),
        ("exit", "SystemExit", "130"),
        ("leave", "PeerError", "rank 1 left the job too early (pull lane: "),
        ("kill", "PeerError", "lost rank 1, dead or stopped (pull lane: "),
    ],
)
def test_a_failing_rank_ends_all_with_its_own_error(how: str, kind: str, words: str) -> None:
    ends = run_peers(3, fail_on_rank_1, how)
    for rank in (0, 2):
        error = ends[rank].error
        assert error is not None
        assert error[0] == kind
        # Either of two ranks can detect a dead rank first; the other then receives its error.
        assert error[1].removeprefix(f"rank {2 - rank}: ").startswith(words), error
    if how == "kill":
        assert ends[1].code == -signal.SIGKILL
    else:
        own = ends[1].error
        assert (own is None) == (how == "leave")
        assert own is None or not own[1].startswith("rank")


FLUSH_DEADLINE_S = 4.0


def flush(membership: Membership, how: str) -> Any:
    """The last rank takes longer than the deadline for its write-back, or never ends."""
    with TorchPeers(membership, timeout_s=FLUSH_DEADLINE_S) as peers:
        peers.gather("met")
        if peers.rank == 2:
            if how == "late":
                threading.Event().wait(FLUSH_DEADLINE_S + 0.5)
            else:
                os.kill(os.getpid(), getattr(signal, how))
        try:
            return peers.gather(peers.rank)
        except PeerError as error:
            return str(error)


@pytest.mark.parametrize("how", ["late", "SIGKILL", "SIGSTOP"])
def test_gather_waits_only_for_living_ranks(how: str) -> None:
    ends = run_ranks(3, flush, how, stopped=2 if how == "SIGSTOP" else -1)
    for end in ends[:2]:
        assert end.error is None
        if how == "late":
            assert end.value == [0, 1, 2]
        else:
            assert end.value.startswith("lost rank 2, dead or stopped")


def fail_while_others_wait(peers: TorchPeers) -> Any:
    """Rank 0 waits in no collective with a dead connection, so it must receive the error."""
    reported: list[BaseException] = []
    was_reported = threading.Event()

    def listen(error: BaseException) -> None:
        reported.append(error)
        was_reported.set()

    peers.listen(listen)
    if peers.rank == 1:
        raise InputError("bad column")
    assert was_reported.wait(LONG_DEADLINE_S)
    raise StoreError("a consequence, such as the store that rank 1 had started") from reported[0]


def test_a_waiting_rank_gets_the_first_error() -> None:
    ends = run_peers(2, fail_while_others_wait)
    assert ends[0].error == ("InputError", "rank 1: bad column")
    assert ends[1].error == ("InputError", "bad column")


def test_ranks_that_cannot_connect_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagpipe.distributed.process_groups.START_TIMEOUT_S", 1.0)
    membership = Membership(rank=1, world_size=2, local_world_size=2, address="127.0.0.1", port=1)
    with pytest.raises(PeerError, match=r"rank 1 of 2 cannot reach the others through 127.0.0.1:1 \(MASTER_ADDR"):
        with TorchPeers(membership, timeout_s=1.0):
            pass


def fail_alike(peers: TorchPeers) -> None:
    """Every rank raises the same error; one of them also raises it as a forwarded error."""
    peers.gather(None)
    raise InputError("bad column" if peers.rank == 1 else "rank 1: bad column")


def test_an_error_on_all_ranks_is_raised_unchanged() -> None:
    ends = run_peers(3, fail_alike)
    errors = ["rank 1: bad column", "bad column", "rank 1: bad column"]
    assert [end.error for end in ends] == [("InputError", error) for error in errors]


def fail_beside_a_wait(peers: TorchPeers) -> list[str]:
    """This rank reports its error from another thread than the one that waits for the others."""
    errors = []
    if peers.rank == 0:
        timer = threading.Timer(0.1, peers.report, (InputError("bad column"),))
        timer.start()
    for wait in (lambda: peers.agree(StepVote.GO), lambda: peers.gather(None)):
        try:
            wait()
        except (InputError, PeerError) as error:
            errors.append(str(error))
    if peers.rank == 0:
        timer.join()
    return errors


def only_rank_0_waits(peers: TorchPeers) -> list[str]:
    if peers.rank == 0:
        return fail_beside_a_wait(peers)
    reported = threading.Event()
    peers.listen(lambda error: reported.set())
    assert reported.wait(LONG_DEADLINE_S)
    return []


def test_a_rank_s_own_failure_ends_its_waits() -> None:
    ends = run_peers(2, only_rank_0_waits)
    assert [end.error for end in ends] == [None, None]
    assert ends[0].value == ["this rank has failed, so it waits for no other"] * 2
