from __future__ import annotations

from typing import Any

import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks, check_same, open_ranks


class _Ranks(Ranks):
    """Rank 0 of several ranks; the answers of the others are given."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__()
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_a_single_rank_agrees_with_itself() -> None:
    with open_ranks(None, timeout_s=1.0, device="cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_first, ranks.peers) == (0, 1, True, None)
        assert ranks.gather(5) == [5]
        assert ranks.share("x") == "x"
        assert ranks.collect(torch.arange(3)).tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="kept"), ranks.reporting():
            raise ValueError("kept")
        ranks.listen(lambda error: None)


def test_ranks_that_differ_are_named() -> None:
    ours, other = {"rows_lr": 0.02, "widths": [8, 4]}, {"rows_lr": 0.5, "widths": [8, 4]}
    check_same(_Ranks([ours]), ours, "settings")
    with pytest.raises(InputError, match=r"the ranks' settings differ: rows_lr is 0\.02 on rank 0 and 0\.5 on rank 2"):
        check_same(_Ranks([ours, other]), ours, "settings")


def test_errors_hide_passwords() -> None:
    first, second = ({"url": url} for url in ("redis://:secret@db:6379", "redis://:other@elsewhere:6379"))
    with pytest.raises(InputError) as caught:
        check_same(_Ranks([second]), first, "settings")
    assert str(caught.value) == (
        "the ranks' settings differ: url is 'redis://:***@db:6379' on rank 0 and "
        "'redis://:***@elsewhere:6379' on rank 1"
    )
