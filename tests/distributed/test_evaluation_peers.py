"""`EvaluationPeers`: messages of an evaluation beside those of a training that waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagpipe.distributed.evaluation_peers import EvaluationPeers
from bagpipe.distributed.interface import StepVote
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.testing.local_peers import LocalPeers
from tests.distributed.processes import run_peers
from tests.distributed.threads import run_threads


def _beside_a_waiting_vote(peers: TorchPeers | LocalPeers) -> Any:
    """Rank 0 votes on a batch of the training; rank 1 does so after the evaluation."""
    votes: list[StepVote] = []
    voter = threading.Thread(target=lambda: votes.append(peers.agree(StepVote.GO)))
    if peers.rank == 0:
        voter.start()
    evaluation: EvaluationPeers | LocalPeers = peers.evaluation()
    vote = evaluation.agree(StepVote.END)
    rows = torch.zeros(2, 1)
    evaluation.exchange("pull", rows, torch.full((2, 1), float(peers.rank)), [1, 1], [1, 1])
    shared = torch.full((1,), float(peers.rank))
    evaluation.plans.broadcast(shared)
    ranks = evaluation.gather(peers.rank)
    if peers.rank == 0:
        voter.join()
    else:
        votes.append(peers.agree(StepVote.STOP))
    return int(vote), rows.flatten().tolist(), float(shared), ranks, [int(found) for found in votes]


_EXPECTED = (StepVote.END, [0.0, 1.0], 0.0, [0, 1], [StepVote.STOP])


@pytest.mark.multiproc
def test_messages_of_an_evaluation_pass_a_waiting_training() -> None:
    assert [ended.value for ended in run_peers(2, _beside_a_waiting_vote)] == [_EXPECTED] * 2


def test_ranks_in_threads_do_the_same() -> None:
    assert [ended.value for ended in run_threads(2, _beside_a_waiting_vote)] == [_EXPECTED] * 2


def _twice(peers: TorchPeers) -> bool:
    return peers.evaluation() is peers.evaluation()


@pytest.mark.multiproc
def test_the_lanes_are_opened_once() -> None:
    assert [ended.value for ended in run_peers(2, _twice)] == [True, True]
