"""Checks of the `model` keys that only some models or losses have, for `bagpipe.config.rules`.

A `model.factory` can read the keys of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config.sections import Config, ModelConfig

__all__ = ["MODELS_OF_KEY", "MODEL_PROBLEMS"]

#: Keys of a model -> the models of the zoo that have them.
MODELS_OF_KEY: Mapping[str, tuple[str, ...]] = {
    "dropout": ("dcnv2-fuxictr", "deepfm-fuxictr", "finalmlp", "mmoe", "ple", "esmm"),
    "batch_norm": ("dcnv2-fuxictr", "deepfm-fuxictr", "finalmlp", "mmoe", "ple", "esmm"),
    "cross_layers": ("dcnv2", "dcnv2-fuxictr"),
    "structure": ("dcnv2-fuxictr",),
    "heads": ("finalmlp",),
    "gate_mlp": ("finalmlp", "mmoe"),
    "first_gate": ("finalmlp",),
    "second_gate": ("finalmlp",),
    "experts": ("mmoe", "ple"),
    "task_experts": ("ple",),
    "levels": ("ple",),
}


def _unused_problem(name: str) -> Callable[[Config], str | None]:
    def problem(config: Config) -> str | None:
        model, models = config.model, MODELS_OF_KEY[name]
        value = getattr(model, name)
        if model.factory or model.name in models or value == getattr(ModelConfig, name):
            return None
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        return f"{shown} needs model.name {' or '.join(models)}, or a model.factory; got {model.name}"

    return problem


def _gate_problem(name: str) -> Callable[[Config], str | None]:
    unused = _unused_problem(name)

    def problem(config: Config) -> str | None:
        model = config.model
        if model.factory or model.gate_mlp or not getattr(model, name):
            return unused(config)
        return f"{getattr(model, name)} needs model.gate_mlp, widths of the gates, got none"

    return problem


def _heads_problem(config: Config) -> str | None:
    model = config.model
    widths = [part[-1] for part in (model.bottom_mlp, model.top_mlp) if part]
    if model.factory or model.name != "finalmlp" or not any(width % model.heads for width in widths):
        return _unused_problem("heads")(config)
    return f"must divide the last widths of model.bottom_mlp and model.top_mlp, {widths}, got {model.heads}"


#: Keys of a loss -> the loss that has them.
_LOSS_OF_KEY: Mapping[str, str] = {"pos_weight": "weighted_bce", "focal_gamma": "focal", "focal_alpha": "focal"}


def _loss_problem(name: str) -> Callable[[Config], str | None]:
    def problem(config: Config) -> str | None:
        value, loss = getattr(config.model, name), _LOSS_OF_KEY[name]
        if value == getattr(ModelConfig, name) or config.model.loss == loss:
            return None
        return f"{value:g} needs model.loss {loss}, got {config.model.loss}"

    return problem


#: Key -> the problem of its value, as the end of the message.
MODEL_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    f"model.{name}": problem
    for name, problem in {
        **{name: _unused_problem(name) for name in MODELS_OF_KEY},
        **{name: _gate_problem(name) for name in ("first_gate", "second_gate")},
        "heads": _heads_problem,
        **{name: _loss_problem(name) for name in _LOSS_OF_KEY},
    }.items()
}
