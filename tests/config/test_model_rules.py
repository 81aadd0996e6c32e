"""Keys of some models are refused with others, in one line."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from bagpipe.config.model_rules import MODELS_OF_KEY
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, Model, ModelConfig
from bagpipe.errors import InputError


def test_the_table_names_keys_and_models() -> None:
    assert set(MODELS_OF_KEY) <= set(ModelConfig.__dataclass_fields__)
    assert {model for models in MODELS_OF_KEY.values() for model in models} <= set(get_args(Model))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"name": "dlrm", "batch_norm": True},
            "model.batch_norm True needs model.name dcnv2-fuxictr or deepfm-fuxictr or finalmlp or mmoe or ple or "
            "esmm, or a model.factory; got dlrm",
        ),
        (
            {"name": "dlrm", "cross_layers": 2},
            "model.cross_layers 2 needs model.name dcnv2 or dcnv2-fuxictr, or a model.factory; got dlrm",
        ),
        (
            {"name": "towers", "gate_mlp": (4, 2)},
            "model.gate_mlp 4,2 needs model.name finalmlp or mmoe, or a model.factory; got towers",
        ),
        ({"first_gate": "I1"}, "model.first_gate I1 needs model.gate_mlp, widths of the gates, got none"),
        (
            {"heads": 4, "bottom_mlp": (8,), "top_mlp": (9, 6)},
            "model.heads must divide the last widths of model.bottom_mlp and model.top_mlp, [8, 6], got 4",
        ),
        ({"heads": 2, "bottom_mlp": (9, 8), "top_mlp": (6,), "gate_mlp": (3,), "second_gate": "C1,I2"}, ""),
        ({"name": "dcnv2", "cross_layers": 2}, ""),
        ({"name": "dlrm", "factory": "mine:build", "dropout": 0.3, "batch_norm": True, "heads": 5}, ""),
    ],
)
def test_keys_of_a_model(values: dict[str, Any], line: str) -> None:
    config = Config(model=ModelConfig(**{"name": "finalmlp", **values}))
    if not line:
        check_config(config)
        return
    with pytest.raises(InputError) as caught:
        check_config(config)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"loss": "hinge"}, "model.loss must be one of bce, weighted_bce, focal, got 'hinge'"),
        ({"pos_weight": 3.0}, "model.pos_weight 3 needs model.loss weighted_bce, got bce"),
        ({"loss": "weighted_bce", "focal_gamma": 1.0}, "model.focal_gamma 1 needs model.loss focal, got weighted_bce"),
        ({"loss": "focal", "focal_gamma": 0.5}, "model.focal_gamma must be 0 or at least 1, got 0.5"),
        ({"label_smoothing": 1.0}, "model.label_smoothing must be at least 0 and below 1, got 1.0"),
    ],
)
def test_keys_that_the_loss_has_not_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        check_config(dataclasses.replace(Config(), model=ModelConfig(**values)))
    assert str(refused.value) == line
