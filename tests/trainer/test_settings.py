from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    StoreConfig,
)
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from trainer.settings import (
    changeable_settings,
    common_settings,
    config_of_rank,
    path_of_rank,
    result_settings,
    with_recorded,
)

DATA = DataSchema(
    label="label", dense=(), features=(Feature(name="item", table="goods"),), tables=(Table(name="goods"),)
)
PLACE = Membership(rank=3, world_size=4, local_rank=1, local_world_size=2)


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


def test_settings_of_one_rank_can_differ() -> None:
    config = Config(run=RunConfig(device="cuda:0"))
    other = Config(run=RunConfig(device="cuda:1", trace="t", tensorboard="b", dir="d"))
    assert common_settings(config) == common_settings(other)
    reports = RunConfig(device="cuda:0", log="l", log_format="json", log_every_s=1, trackers=("wandb",), metrics="a:1")
    assert common_settings(config) == common_settings(Config(run=reports))
    assert common_settings(config)["run.device"] == "cuda"
    assert common_settings(config)["model.top_mlp"] == [128, 64]


def test_costs_of_a_file_count_by_what_they_say(tmp_path: Path) -> None:
    """Ranks with different files would run different orders."""
    texts = []
    for turn, cost in enumerate((2, 2.0, 3)):
        path = tmp_path / f"{turn}.json"
        path.write_text(json.dumps({"W": 1, "F": [1, cost, 9], "I": 1}), encoding="utf-8")
        pipeline = PipelineConfig(schedule="zb-auto", stages=2, microbatches=4, costs=str(path))
        texts.append(common_settings(Config(pipeline=pipeline))["pipeline.costs"])
    assert texts == ["F=2.0,I=1.0,W=1.0", "F=2.0,I=1.0,W=1.0", "F=3.0,I=1.0,W=1.0"]
    assert common_settings(Config())["pipeline.costs"] == ""


def test_only_settings_that_change_results_are_compared() -> None:
    settings = result_settings(Config(), DATA)
    for key in ("optim.rows_lr", "run.seed", "run.threads", "data.batch_size", "model.top_mlp", "pipeline.schedule"):
        assert key in settings
    for key in ("cache.rows", "oracle.lookahead", "store.url", "run.steps", "data.epochs", "data.workers", "run.dir"):
        assert key not in settings


def test_recomputation_may_change_at_every_start_and_is_in_old_checkpoints() -> None:
    settings = result_settings(Config(), DATA)
    same_bits = {"pipeline.recompute", "pipeline.recompute_share"}
    assert same_bits <= settings.keys() & {*changeable_settings(CheckpointConfig())}
    assert not {"pipeline.activations", "pipeline.activation_bytes"} & settings.keys()


def test_settings_of_results_are_those_of_a_manifest() -> None:
    settings = result_settings(Config(), DATA)
    assert settings == json.loads(json.dumps(settings))
    assert result_settings(Config(data=DataConfig(identity="full")), DATA) == settings


def test_recorded_settings_replace_those_of_a_section() -> None:
    recorded = result_settings(Config(model=ModelConfig(name="mmoe", top_mlp=(7, 5)), run=RunConfig(seed=3)), DATA)
    recorded |= {"model.of_another_version": 1}
    assert with_recorded(ModelConfig(embedding_dim=9), "model", recorded) == ModelConfig(name="mmoe", top_mlp=(7, 5))
    assert with_recorded(RunConfig(threads=2), "run", recorded, ("seed",)) == RunConfig(threads=2, seed=3)
