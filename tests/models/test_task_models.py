"""Models with several labels as the training program builds them. Order of inputs: `test_torchrec_models`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bagpipe.config.model_section import ModelConfig
from bagpipe.models.task_models import TASK_MODELS, build_task_model
from bagpipe.models.tasks import loss_and_outputs
from tests.models.comparison import Bags
from tests.models.test_tasks import DIMS, task_batch
from tests.trainer.schemas import schema_of

SCHEMA = dataclasses.replace(schema_of(4, dense=2), label=("click", "buy"))


@pytest.mark.parametrize("name", TASK_MODELS)
def test_logits_give_the_loss_of_the_model_itself(name: str) -> None:
    torch.manual_seed(0)
    model = build_task_model(Bags(DIMS), SCHEMA, ModelConfig(name=name, bottom_mlp=(5,), top_mlp=(3,))).double()
    batch = task_batch("click", "buy")
    if name == "esmm":
        batch["buy"] = batch["buy"] * batch["click"]
    logits = model(batch["dense"], batch["sparse"])
    assert [tuple(head.shape) for head in logits] == [(6,), (6,)]
    loss, outputs = loss_and_outputs(logits, {"click": 1.0, "buy": 1.0}, batch)
    expected, theirs = model.model(batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found = theirs["ctcvr"] if name == "esmm" else theirs["buy"]
    torch.testing.assert_close(outputs["buy"], found, rtol=1e-12, atol=0)


def test_the_numbers_of_experts_are_the_configurations() -> None:
    config = ModelConfig(name="ple", bottom_mlp=(5, 4), top_mlp=(3,), experts=3, task_experts=2, levels=3)
    ple = build_task_model(Bags(DIMS), SCHEMA, config).model
    assert (len(ple.levels), len(ple.levels[0].shared), len(ple.levels[0].of_tasks[0])) == (3, 3, 2)
    mmoe = build_task_model(Bags(DIMS), SCHEMA, dataclasses.replace(config, name="mmoe", gate_mlp=(7,))).model
    assert (len(mmoe.experts), len(mmoe.gates), mmoe.gates[0][0].out_features) == (3, 2, 7)
