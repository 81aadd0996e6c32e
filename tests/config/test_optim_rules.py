"""Optimizer keys that depend on each other: one line each."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.optim_rules import CHANGEABLE
from bagpipe.config.optim_section import OptimConfig
from bagpipe.config.rules import check_config
from bagpipe.config.sections import CheckpointConfig, Config, DenseConfig, RunConfig
from bagpipe.errors import InputError


def optim(**values: Any) -> Config:
    return dataclasses.replace(Config(), optim=OptimConfig(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "cosine", "schedule_length": 9, "schedule_floor": 0.1, "warmup_steps": 3, "warmup_start": 0.1},
        {"schedule": "step", "schedule_every": 3, "schedule_factor": 0.5, "schedule_unit": "epoch"},
        {"schedule": "step", "schedule_milestones": (3, 3, 9)},
        {"rows_schedule": "exponential", "schedule_every": 100, "rows_warmup_steps": 5, "warmup_start": 0.5},
        {"schedule": "cosine", "schedule_length": 9, "rows_schedule": "polynomial", "schedule_power": 2.0},
        {"rows": "adam", "rows_weight_decay": 0.1, "rows_decay_kind": "l2"},
        {"rows": "adamw", "rows_weight_decay": 0.1, "rows_by_table": ("a=frozen", "b=sgd")},
        {"rows": "ftrl", "ftrl_beta": 0.0, "ftrl_l2": 0.1},
        {"rows": "ftrl", "ftrl_l1": 0.1, "schedule": "cosine", "schedule_length": 9, "rows_schedule": "constant"},
        {"rows_by_table": ("a=momentum", "b=frozen"), "rows_momentum": 0.5, "rows_lr_by_table": ("a=0.1", "c=1e-3")},
    ],
)
def test_consistent_keys_pass(values: dict[str, Any]) -> None:
    check_config(optim(**values))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"schedule": "linear"},
            "optim.schedule must be one of constant, step, exponential, cosine, polynomial, plateau, got 'linear'",
        ),
        (
            {"rows_schedule": "linear"},
            "optim.rows_schedule must be one of same, constant, step, exponential, cosine, polynomial, plateau, "
            "got 'linear'",
        ),
        (
            {"schedule": "cosine"},
            "optim.schedule cosine needs optim.schedule_length, the steps or epochs to its end, got 0",
        ),
        (
            {"rows_schedule": "polynomial"},
            "optim.rows_schedule polynomial needs optim.schedule_length, the steps or epochs to its end, got 0",
        ),
        (
            {"schedule": "plateau"},
            "optim.schedule plateau needs eval.every, the steps or epochs between evaluations, got 0",
        ),
        (
            {"schedule_patience": 3},
            "optim.schedule_patience 3 needs optim.schedule plateau, got constant",
        ),
        ({"schedule": "exponential"}, "optim.schedule exponential needs optim.schedule_every above 0, got 0"),
        (
            {"schedule": "step"},
            "optim.schedule step needs optim.schedule_every or optim.schedule_milestones, got neither",
        ),
        (
            {"schedule": "step", "schedule_every": 2, "schedule_milestones": (1,)},
            "optim.schedule step needs optim.schedule_every or optim.schedule_milestones, got both",
        ),
        (
            {"schedule_length": 10},
            "optim.schedule_length 10 needs optim.schedule cosine or polynomial, got constant",
        ),
        (
            {"schedule": "cosine", "schedule_length": 9, "schedule_milestones": (2, 4)},
            "optim.schedule_milestones 2,4 needs optim.schedule step, got cosine",
        ),
        (
            {"schedule": "step", "schedule_milestones": (4, 2)},
            "optim.schedule_milestones must be ascending numbers of at least 1, got (4, 2)",
        ),
        ({"schedule_floor": 1.5}, "optim.schedule_floor must be from 0 to 1, got 1.5"),
        ({"warmup_start": 0.5}, "optim.warmup_start 0.5 needs optim.warmup_steps above 0, got 0"),
        (
            {"rows_warmup_steps": 5},
            "optim.rows_warmup_steps 5 needs optim.rows_schedule, a schedule of the rows' own, got same",
        ),
        ({"momentum": 0.9}, "optim.momentum 0.9 needs optim.dense sgd, got adagrad"),
        ({"nesterov": True, "dense": "sgd"}, "optim.nesterov needs optim.momentum above 0, got 0"),
        ({"beta2": 0.99}, "optim.beta2 0.99 needs optim.dense adam or adamw or lamb, got adagrad"),
        ({"beta1": 1.0}, "optim.beta1 must be at least 0 and below 1, got 1.0"),
        ({"weight_decay": -0.1}, "optim.weight_decay must be at least 0, got -0.1"),
        ({"clip_norm": -1.0}, "optim.clip_norm must be at least 0, got -1.0"),
        ({"weight_decay_exempt": ("1d",)}, "optim.weight_decay_exempt 1d needs optim.weight_decay above 0, got 0"),
        ({"clip_scope": "all"}, "optim.clip_scope all needs optim.clip_norm above 0, got 0"),
        ({"clip_norm": 1.0, "clip_value": 0.5}, "optim.clip_value 0.5 needs optim.clip_norm 0, got 1"),
        ({"clip_scope": "tables"}, "optim.clip_scope must be one of dense, rows, all, got 'tables'"),
        (
            {"rows_by_table": ("user=lamb",)},
            "optim.rows_by_table must be TABLE=OPTIMIZER, the optimizer one of sgd, momentum, adagrad, "
            "rowwise_adagrad, adam, adamw, ftrl, frozen, got 'user=lamb'",
        ),
        (
            {"rows_lr_by_table": ("user=-1",)},
            "optim.rows_lr_by_table must be TABLE=RATE, the rate a finite number above 0, got 'user=-1'",
        ),
        ({"rows_by_table": ("a=sgd", "a=adam")}, "optim.rows_by_table names table 'a' more than once"),
        (
            {"rows_by_table": ("a=frozen",), "rows_lr_by_table": ("a=1",)},
            "optim.rows_lr_by_table gives a rate to table 'a', which optim.rows_by_table freezes",
        ),
        (
            {"rows_weight_decay": 0.1, "rows": "ftrl"},
            "optim.rows_weight_decay 0.1 is not possible with ftrl, whose next step would undo it: use optim.ftrl_l2",
        ),
        (
            {"rows_weight_decay": 0.1, "rows": "adamw", "rows_decay_kind": "l2"},
            "optim.rows_weight_decay 0.1 of adamw is decoupled: use adam for optim.rows_decay_kind l2",
        ),
        (
            {"rows_decay_kind": "l2"},
            "optim.rows_weight_decay 0 with optim.rows_decay_kind l2, expected more than 0",
        ),
        ({"rows_momentum": 0.5}, "optim.rows_momentum 0.5 needs optim.rows momentum, got adagrad"),
        ({"ftrl_l1": 0.5, "rows": "adam"}, "optim.ftrl_l1 0.5 needs optim.rows ftrl, got adam"),
        ({"ftrl_beta": 0.5, "rows": "adam"}, "optim.ftrl_beta 0.5 needs optim.rows ftrl, got adam"),
        (
            {"ftrl_beta": 0.0, "rows_by_table": ("a=ftrl",)},
            "optim.ftrl_beta 0 needs optim.ftrl_l2 above 0, as a small gradient would be divided by 0, got 0",
        ),
        (
            {"rows_by_table": ("a=ftrl",), "warmup_steps": 3},
            "optim.rows ftrl needs a rate of rows that does not change, its state is in units of it: "
            "optim.rows_schedule constant without a warm-up, got constant and 3 steps of warm-up",
        ),
        ({"ema_evaluate": True}, "optim.ema_evaluate needs optim.ema_decay above 0, got 0"),
    ],
)
def test_keys_that_do_not_fit_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        check_config(optim(**values))
    assert str(refused.value) == line


KFAC = {"precondition": "kfac"}


@pytest.mark.parametrize(
    ("optim_values", "sections", "line"),
    [
        ({"kfac_damping": 0.1}, {}, "optim.kfac_damping 0.1 needs optim.precondition kfac, got none"),
        (
            {**KFAC, "kfac_lag": 1},
            {},
            "optim.kfac_lag 1 needs a pipeline.schedule, in whose bubbles inversions go, got none",
        ),
        (
            KFAC,
            {"run": RunConfig(compile=True)},
            "optim.precondition kfac is not possible with run.compile: compiled layers do not show their inputs",
        ),
        (
            KFAC,
            {"dense": DenseConfig(budget_bytes=1000), "run": RunConfig(device="cuda")},
            "optim.precondition kfac is not possible with dense.budget_bytes or dense.state host on run.device cuda: "
            "torch has gradients where their parameters are, which are on the host meanwhile",
        ),
        (
            {**KFAC, "clip_norm": 1.0},
            {},
            "optim.precondition kfac limits steps by optim.kfac_kappa: expected optim.clip_norm 0, or of rows alone, "
            "got 1",
        ),
    ],
)
def test_what_kfac_does_not_go_with(optim_values: dict[str, Any], sections: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        check_config(dataclasses.replace(optim(**optim_values), **sections))
    assert str(refused.value) == line


def test_keys_that_a_resume_may_change() -> None:
    assert {"optim.dense_lr", "optim.rows_lr", "optim.eps", "optim.schedule", "optim.warmup_steps"} <= set(CHANGEABLE)
    assert not {"optim.rows", "optim.rows_by_table", "optim.dense", "optim.ema_decay", "run.seed"} & set(CHANGEABLE)
    check_config(dataclasses.replace(Config(), checkpoint=CheckpointConfig(dir="x", change=CHANGEABLE)))
    for change, words in (
        (("optim.dense_lr", "optim.dense"), f"must be some of {', '.join(CHANGEABLE)}, got 'optim.dense'"),
        (("optim.dense_lr",), "optim.dense_lr needs checkpoint.dir, a folder, got none"),
    ):
        with pytest.raises(InputError) as refused:
            check_config(dataclasses.replace(Config(), checkpoint=CheckpointConfig(change=change)))
        assert str(refused.value) == f"checkpoint.change {words}"


def test_the_documentation_names_the_keys_that_a_resume_may_not_change() -> None:
    text = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    named = re.search(r"All keys\sof `optim` can change except (.*?):", text, re.DOTALL)
    assert named is not None
    free = {"optim.ema_evaluate"}  # named behind them: it changes no trained bit
    keys = {f"optim.{item.name}" for item in dataclasses.fields(OptimConfig)}
    assert set(re.findall(r"`([\w.]+)`", named[1])) == keys - set(CHANGEABLE) - free
