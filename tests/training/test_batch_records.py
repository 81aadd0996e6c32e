"""Records of ranks become records of whole batches, in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from bagpipe.training.batch_records import BatchRecord, join_records, keeper
from tests.distributed.threads import run_threads


def joined(peers: Any) -> list[tuple[Any, ...]]:
    """Ranks 0 and 2 look up: both of batch 0, and rank 2 of batch 1 alone, whose second value gets no gradient."""
    own: dict[int, BatchRecord] = {}
    if peers.rank != 1:
        for b in (0, 1) if peers.rank else (0,):
            values = (torch.full((2, 3), float(peers.rank)), torch.full((2, 1), float(b)))
            own[b] = BatchRecord(size=4, labels=torch.tensor([peers.rank, b]), values=values)
            keeper(own[b].gradients, 0)(values[0] + 10)
    found = join_records(own, range(2), torch.device("cpu"), peers.dense, peers.gather)
    return [
        (record.size, record.labels.tolist(), [v.tolist() for v in record.values], sorted(record.gradients))
        for record in found.values()
    ] + [(found[0].gradients[0].tolist(),)]


def test_every_rank_has_the_records_of_whole_batches() -> None:
    ends = run_threads(3, joined)
    assert [end.error for end in ends] == [None] * 3
    assert ends[0].value == ends[1].value == ends[2].value
    first, second, (gradients,) = ends[0].value
    assert first == (4, [0, 0, 2, 0], [[[0.0] * 3] * 2 + [[2.0] * 3] * 2, [[0.0]] * 4], [0])
    assert second == (4, [2, 1], [[[2.0] * 3] * 2, [[1.0]] * 2], [0])
    assert gradients == [[10.0] * 3] * 2 + [[12.0] * 3] * 2
