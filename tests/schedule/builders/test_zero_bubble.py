from __future__ import annotations

import pytest

from tests.schedule.dense import SIZES, dense, peaks, rows, run, spelt


def test_small_tables() -> None:
    assert rows(dense("zb-h1", 4, 6)) == [
        spelt("F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5", 0),
        spelt("F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5", 1),
        spelt("F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5", 2),
        spelt("F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5", 3),
    ]
    assert rows(dense("zb-v", 2, 4)) == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3",
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3",
    ]


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 4, 2)])
@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_zb_h1_closed_forms(ranks: int, micro: int, f: int, i: int, w: int) -> None:
    result = run("zb-h1", ranks, micro, costs={"F": f, "I": i, "W": w})
    assert result.makespan == micro * (f + i + w) + (ranks - 1) * (f + i - w)
    assert peaks(result) == [ranks] * ranks


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 4, 2), (1, 1, 2)])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 3), (2, 8), (4, 8), (4, 16), (8, 15), (8, 16)])
def test_zb_h2_closed_forms(ranks: int, micro: int, f: int, i: int, w: int) -> None:
    """Rank r waits (P - 1 - r) (F + I - 2W), at most the papers' (P - 1) (F + I - 2W): nothing if F = I = W."""
    result = run("zb-h2", ranks, micro, costs={"F": f, "I": i, "W": w})
    hop = max(0, f + i - 2 * w)
    assert [use.span_idle for use in result.lanes.values()] == [(ranks - 1 - rank) * hop for rank in range(ranks)]
    assert peaks(result) == [2 * ranks - 1] * ranks


def test_zb_h2_ends_when_its_last_rank_does() -> None:
    """The last rank starts (P - 1) F late, and never waits."""
    assert run("zb-h2", 4, 8).makespan == 3 * 8 + 3


@pytest.mark.parametrize(("ranks", "micro", "chunks"), [(2, 2, 2), (4, 4, 2), (4, 16, 3), (8, 8, 2), (8, 16, 4)])
def test_interleaved_zero_bubble_waits_a_third_as_long_as_interleaved(ranks: int, micro: int, chunks: int) -> None:
    ours, theirs = (run(name, ranks, micro, chunks=chunks) for name in ("interleaved-zero-bubble", "interleaved"))
    load = 3 * chunks * micro
    assert ours.makespan - load == ranks - 1 == (theirs.makespan - load) / 3
    assert peaks(ours) == [chunks * ranks] * ranks


@pytest.mark.parametrize(("ranks", "micro"), [*((p, m) for p, m in SIZES if m >= 2 * p), (2, 3), (8, 15)])
def test_no_rank_of_zb_v_waits(ranks: int, micro: int) -> None:
    result = run("zb-v", ranks, micro)
    assert [use.span_idle for use in result.lanes.values()] == [0] * ranks
    assert result.makespan == 6 * micro + ranks - 1
    assert peaks(result) == [2 * ranks] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_zb_v_needs_twice_the_ranks_to_fill(ranks: int) -> None:
    """With M = P rank 0 runs out of forwards before the first micro-batch returns, and waits."""
    result = run("zb-v", ranks, ranks)
    assert [use.span_idle for use in result.lanes.values()] == [2 * (ranks - 1 - rank) for rank in range(ranks)]
    assert peaks(result) == [ranks + 1 + rank for rank in range(ranks)]


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_batch_too_small_to_fill_the_pipe_is_allowed(micro: int) -> None:
    for name in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min"):
        assert max(peaks(run(name, 4, micro))) <= 2 * micro
