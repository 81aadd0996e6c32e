from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.testing.local_peers import local_peers
from bagpipe.training.agreement import Agreement

NAMES = {0: ["a", "b"], 1: ["c"], 2: ["d", "e"]}
ORDER = ["c", "a", "b", "e", "d"]
CPU = torch.device("cpu")


def test_one_rank_knows_all() -> None:
    agreement = Agreement(NAMES, ORDER, gives=[0, 1, 2], divided=[], device=CPU)
    norms = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0]), 2: torch.tensor([4.0, 5.0])}
    num_bad, found = agreement.reach(is_bad=True, norms=norms)
    assert (float(num_bad), found.tolist()) == (1.0, [3.0, 1.0, 2.0, 5.0, 4.0])


def test_a_stage_that_no_backward_has_reached_has_no_norm() -> None:
    agreement = Agreement(NAMES, ORDER, gives=[0, 1, 2], divided=[], device=CPU)
    assert agreement.reach(is_bad=False, norms={1: torch.tensor([3.0])})[1].tolist() == [3.0, 0.0, 0.0, 0.0, 0.0]


def test_without_norms_the_ranks_only_say_whether_the_batch_is_bad() -> None:
    agreement = Agreement({}, ORDER, gives=[0], divided=[0], device=CPU)
    num_bad, norms = agreement.reach(is_bad=False, norms={0: torch.tensor([1.0, 2.0])})
    assert (float(num_bad), norms.tolist()) == (0.0, [])


@given(
    norms=st.lists(st.floats(0, 1e9, width=32), min_size=5, max_size=5),
    bad=st.lists(st.booleans(), min_size=3, max_size=3),
    shares=st.lists(st.floats(0, 1e9, width=32), min_size=3, max_size=3),
)
def test_all_ranks_hear_the_same(norms: list[float], bad: list[bool], shares: list[float]) -> None:
    """Stage 0 is on ranks 0 and 1, of which the first gives its norms; stage 1 is divided among all; 2 is on rank 2."""
    held = {0: [0, 1], 1: [1], 2: [1, 2]}
    gives = {0: [0], 1: [], 2: [2]}
    own = {0: torch.tensor(norms[:2], dtype=torch.float64), 2: torch.tensor(norms[3:], dtype=torch.float64)}

    def reach(peer) -> tuple[float, list[float]]:
        groups = peer.open_stage_groups([(0, 1, 2)])
        agreement = Agreement(NAMES, ORDER, gives=gives[peer.rank], divided=[1], device=CPU, group=groups[0, 1, 2])
        found = {stage: own[stage] for stage in held[peer.rank] if stage in own}
        found[1] = torch.tensor([shares[peer.rank]], dtype=torch.float64).square()
        num_bad, told = agreement.reach(is_bad=bad[peer.rank], norms=found)
        return float(num_bad), told.tolist()

    with ThreadPoolExecutor(3) as threads:
        told = [*threads.map(reach, local_peers(3))]
    total = torch.tensor(shares, dtype=torch.float64).square().sum().sqrt().item()
    assert told == [(sum(bad), [total, norms[0], norms[1], norms[4], norms[3]])] * 3
