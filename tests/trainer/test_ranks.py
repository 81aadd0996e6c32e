from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bagpipe.config.sections import Config, RunConfig, StoreConfig
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from trainer.ranks import Ranks, check_same, common_settings, config_of_rank, open_ranks, path_of_rank

PLACE = Membership(rank=3, world_size=4, local_rank=1, local_world_size=2)


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


def test_every_rank_gets_the_device_of_its_local_rank() -> None:
    config = Config(run=RunConfig(device="cuda"))
    assert config_of_rank(config, PLACE).run.device == "cuda:1"
    assert config_of_rank(config, None) == config
    assert config_of_rank(Config(), PLACE) == Config()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(run=RunConfig(device="cuda:0")), "run.device is cuda:0, but each of 4 ranks needs its own: use cuda"),
        (
            Config(store=StoreConfig(url="memory://x")),
            "store.url is memory://x, which is private to one process; 4 ranks",
        ),
    ],
)
def test_settings_that_ranks_cannot_share_are_refused(config: Config, words: str) -> None:
    with pytest.raises(InputError, match=words):
        config_of_rank(config, PLACE)
    assert config_of_rank(config, None) == config


def test_every_rank_has_files_of_its_own() -> None:
    assert path_of_rank("/x/trace.json", 0) == "/x/trace.json"
    assert path_of_rank("/x/trace.json", 2) == "/x/trace.rank2.json"
    assert path_of_rank("trace", 1) == "trace.rank1"
    assert path_of_rank("", 2) == ""


def test_ranks_that_differ_are_named() -> None:
    config = Config()
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, rows_lr=0.5))
    check_same(_Ranks([common_settings(config)]), common_settings(config), "configurations")
    message = "the ranks' configurations differ: optim.rows_lr is 0.02 on rank 0 and 0.5 on rank 2"
    with pytest.raises(InputError, match=message):
        check_same(_Ranks([common_settings(config), common_settings(other)]), common_settings(config), "configurations")


def test_settings_of_one_rank_can_differ() -> None:
    config = Config(run=RunConfig(device="cuda:0"))
    other = Config(run=RunConfig(device="cuda:1", trace="t", tensorboard="b", dir="d"))
    assert common_settings(config) == common_settings(other)
    assert common_settings(config)["run.device"] == "cuda"
    assert common_settings(config)["model.top_mlp"] == [128, 64]


def test_errors_hide_passwords() -> None:
    urls = ["redis://:secret@db:6379", "redis://:other@elsewhere:6379"]
    first, second = (common_settings(Config(store=StoreConfig(url=url))) for url in urls)
    with pytest.raises(InputError) as caught:
        check_same(_Ranks([second]), first, "configurations")
    assert str(caught.value) == (
        "the ranks' configurations differ: store.url is 'redis://:***@db:6379' on rank 0 and "
        "'redis://:***@elsewhere:6379' on rank 1"
    )
