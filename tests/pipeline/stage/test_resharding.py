"""Reshardings of tensors over gloo between real processes, and over links between threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagpipe.cluster.network import Network
from bagpipe.errors import JobError
from bagpipe.pipeline.stage.resharding import reshard
from bagpipe.schedule.resharding.greedy import greedy
from bagpipe.schedule.resharding.layouts import LAYOUT_KINDS, Layout
from bagpipe.schedule.resharding.plan import Resharding, send_to_all
from tests.distributed.processes import Ended, run_peers
from tests.distributed.threads import run_threads

NETWORK = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-6, message_s=1e-9)
SHAPE = (3, 2)

#: (ranks of the source, their shares, ranks of the target): apart, overlapping, the same ones in another order.
SIDES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((0,), (), (1, 2, 3)),
    ((0, 1), (2, 1), (2, 3)),
    ((3, 1, 0), (3, 0, 1), (2,)),
    ((0, 1, 2), (), (3, 2, 1)),
    ((0, 1, 2, 3), (), (3, 2, 1, 0)),
]


def plans() -> list[Resharding]:
    found = []
    for number, kinds in itertools.product(range(len(SIDES)), itertools.product(LAYOUT_KINDS, repeat=2)):
        ranks, shares, after = SIDES[number]
        before = Layout(kind=kinds[0], ranks=ranks, shares=() if kinds[0] == "replicated" else shares)
        target = Layout(kind=kinds[1], ranks=after)
        found.append(greedy(before, target, 13, 6, NETWORK))
        if number == 2:
            found += [send_to_all(before, target, rows, 6) for rows in (0, 2)]
    return found


def parts(layout: Layout, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """The rank's part of a tensor, as a stage would have it."""
    if rank not in layout.ranks:
        return None
    box = layout.boxes(tensor.shape[0], 6)[layout.ranks.index(rank)]
    part = tensor.reshape(-1, 6)[box.index]
    return part if layout.kind == "features" else part.reshape(-1, *SHAPE)


def all_of_them(peers: Any) -> list[str]:
    """Carry out every plan; the wrong ones."""
    links, wrong = peers.open_links(4), []
    for number, plan in enumerate(plans()):
        dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
        tensor = torch.arange(plan.rows * 6).reshape(plan.rows, *SHAPE).to(dtype)
        own, expected = (parts(layout, tensor, peers.rank) for layout in (plan.source, plan.target))
        found = reshard(plan, own, rank=peers.rank, links=links, tag=7, shape=SHAPE, dtype=dtype)
        if (found is None) != (expected is None) or (
            found is not None and expected is not None and not torch.equal(found, expected)
        ):
            wrong.append(f"{plan.source} to {plan.target}, {plan.rows} rows")
    return wrong


@pytest.mark.multiproc
@pytest.mark.parametrize("run", [run_peers, run_threads])
def test_all_pairs_of_layouts_on_four_ranks_are_exact(run: Callable[..., list[Ended]]) -> None:
    for end in run(4, all_of_them):
        assert end.error is None
        assert end.value == []


def test_refused() -> None:
    plan = send_to_all(Layout(kind="batch", ranks=(0,)), Layout(kind="batch", ranks=(0,)), 4, 6)

    def attempt(part: torch.Tensor | None, shape: tuple[int, ...] = SHAPE) -> None:
        reshard(plan, part, rank=0, links=None, tag=0, shape=shape, dtype=torch.float32)  # type: ignore[arg-type]

    with pytest.raises(JobError, match=r"expected examples of 6 elements, got the shape \[5\]"):
        attempt(torch.zeros(4, 5), (5,))
    words = r"expected a part of 4 examples with 6 elements of torch.float32 each, got "
    with pytest.raises(JobError, match=words + "none"):
        attempt(None)
    with pytest.raises(JobError, match=words + r"torch.float32 \[3, 6\]"):
        attempt(torch.zeros(3, 6))
    with pytest.raises(JobError, match=words + r"torch.float64 \[4, 6\]"):
        attempt(torch.zeros(4, 6, dtype=torch.float64))
