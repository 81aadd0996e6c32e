from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.config.sections import OptimConfig
from bagpipe.errors import InputError
from bagpipe.rates import Cosine, Exponential, Schedule, StepDecay
from trainer.optimizers import dense_optimizer, rate_schedule, rows_rate_schedule, undecayed_parameters


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", "SGD"), ("adagrad", "Adagrad"), ("adam", "Adam"), ("adamw", "AdamW"), ("lamb", "Lamb")],
)
def test_dense_optimizers(name: str, kind: str) -> None:
    parameters = torch.nn.Linear(2, 1).parameters()
    optimizer = dense_optimizer(parameters, OptimConfig(dense=name, dense_lr=0.5, eps=1e-3))
    assert type(optimizer).__name__ == kind
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults.get("eps", 1e-3) == 1e-3


def test_exempt_parameters_are_a_group_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    config = OptimConfig(dense="adamw", weight_decay=0.1, dense_lr=0.5)

    def groups(*patterns: str, of: nn.Module = model) -> list[tuple[float, float, int]]:
        exempt = undecayed_parameters(model.named_parameters(), patterns)
        optimizer = dense_optimizer(of.parameters(), config, exempt)
        return [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]

    assert groups() == [(0.5, 0.1, 6)]
    assert groups("1d") == [(0.5, 0.1, 2), (0.5, 0.0, 4)]
    assert groups("*.bias", "1.*") == [(0.5, 0.1, 2), (0.5, 0.0, 4)]
    assert groups("1.*", of=model[0]) == [(0.5, 0.1, 2)]
    assert groups("*", of=model[1]) == [(0.5, 0.0, 2)]
    with pytest.raises(InputError, match=r"exempt: 'bias' fits no dense parameter; there are 0\.weight, "):
        groups("bias")


def test_an_unknown_dense_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"optim.dense must be one of sgd"):
        dense_optimizer([], OptimConfig(dense="lion"))


def test_schedules_of_the_configuration() -> None:
    assert (rate_schedule(OptimConfig()), rows_rate_schedule(OptimConfig())) == (Schedule(), Schedule())
    both = OptimConfig(schedule="cosine", schedule_length=9, schedule_floor=0.1, warmup_steps=3, warmup_start=0.2)
    expected = Schedule(shape=Cosine(length=9, floor=0.1), warmup_steps=3, warmup_start=0.2)
    assert (rate_schedule(both), rows_rate_schedule(both)) == (expected, expected)
    own = OptimConfig(
        schedule="step",
        schedule_every=2,
        schedule_unit="epoch",
        warmup_steps=3,
        rows_schedule="exponential",
        rows_warmup_steps=1,
    )
    assert rate_schedule(own) == Schedule(shape=StepDecay(factor=0.1, every=2), warmup_steps=3, by_epoch=True)
    assert rows_rate_schedule(own) == Schedule(shape=Exponential(factor=0.1, every=2), warmup_steps=1, by_epoch=True)
