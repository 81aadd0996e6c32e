"""Numbers and bytes between rank 0 and the others, in threads and over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from bagpipe.lookahead.transport import RankTransport
from tests.distributed.processes import run_peers
from tests.distributed.threads import run_threads


def move_everything(peers: Any) -> list[Any]:
    """Every call, with sizes from 0."""
    transport = RankTransport(peers.plans)
    rank, size = transport.rank, transport.world_size
    given, sizes = [bytes([rank] * rank), b"end" * (rank % 2)], [r + 3 * (r % 2) for r in range(size)]
    answers = [[bytes([10 + r] * (2 * r))] for r in range(size)]
    found: list[Any] = [
        transport.share_numbers([5 + rank, -(2**60)]),
        transport.gather_numbers([rank, 2 * rank]),
        transport.share_bytes(b"text" if rank == 0 else b"", 4),
        transport.share_bytes(b"", 0),
        transport.gather_bytes(given, sizes),
        transport.scatter_bytes(answers if rank == 0 else [], [2 * r for r in range(size)]),
        transport.gather_bytes([], [0] * size),
        transport.scatter_bytes([[]] * size, [0] * size),
    ]
    return found


def expected(rank: int, size: int) -> list[Any]:
    gathered = [bytes([r] * r) + b"end" * (r % 2) for r in range(size)]
    return [
        [5, -(2**60)],
        [[r, 2 * r] for r in range(size)],
        b"text",
        b"",
        gathered if rank == 0 else [],
        bytes([10 + rank] * (2 * rank)),
        [b""] * size if rank == 0 else [],
        b"",
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads(world_size: int) -> None:
    ends = run_threads(world_size, move_everything)
    assert [end.value for end in ends] == [expected(rank, world_size) for rank in range(world_size)]


@pytest.mark.multiproc
@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo(world_size: int) -> None:
    ends = run_peers(world_size, move_everything)
    assert [end.error for end in ends] == [None] * world_size
    assert [end.value for end in ends] == [expected(rank, world_size) for rank in range(world_size)]
