"""`LaneGroup` in real processes, created by `TorchPeers` for the dense part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagpipe.distributed.collectives import _first_sentence
from bagpipe.distributed.process_groups import TorchPeers
from tests.distributed.processes import run_peers


def every_collective(peers: TorchPeers) -> dict[str, Any]:
    lane, rank = peers.dense, peers.rank
    gathered = torch.empty(3 * peers.world_size)
    lane.all_gather(gathered, torch.full((3,), float(rank)))
    first = torch.full((2,), float(rank + 5))
    lane.broadcast(first)
    others = {
        "small": torch.full((), rank + 7, dtype=torch.int16),
        "flags": torch.tensor([rank == 0, False]),
        "columns": torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16).t(),
        "none": torch.empty(0, 4),
    }
    for tensor in others.values():
        lane.broadcast(tensor)
    last = torch.full((2,), float(rank + 5))
    lane.broadcast(last, peers.world_size - 1)
    return {
        "gathered": gathered.tolist(),
        "uneven": [part.tolist() for part in lane.collect(torch.arange(rank))],
        "maximum": lane.maximum(3 * rank - 1),
        "broadcast": first.tolist(),
        "last": last.tolist(),
        "others": [tensor.tolist() for tensor in others.values()],
        "hang": lane.find_hang(),
    }


@pytest.mark.multiproc
def test_collectives() -> None:
    for rank, end in enumerate(run_peers(3, every_collective)):
        assert end.error is None
        assert end.value == {
            "gathered": [0.0] * 3 + [1.0] * 3 + [2.0] * 3,
            "uneven": [[], [0], [0, 1]] if rank == 0 else [],
            "maximum": 5,
            "broadcast": [5.0, 5.0],
            "last": [7.0, 7.0],
            "others": [7, [True, False], [[1.0, 1.0]] * 3, []],
            "hang": None,
        }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:7. This", "Connection closed by peer [10.0.0.1]:7"),
        ("[/gloo/buffer.cc:78] Timed out waiting 5000ms for recv", "Timed out waiting 5000ms for recv"),
        ("no source file\nsecond line", "no source file"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_shortened_communicator_errors(text: str, words: str) -> None:
    assert _first_sentence(RuntimeError(text)) == words
