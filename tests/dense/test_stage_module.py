"""Stages under autocast, optionally compiled: their modules, parameters and copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bagpipe.dense import compiler as compiled
from bagpipe.dense.compiler import Compiler
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import DenseStage, prepared
from tests.dense.small import BFLOAT16, model_of, whole


def test_an_eager_model_is_not_wrapped() -> None:
    staged = whole(model_of("dlrm"))
    assert prepared(staged, Precision(loss_scale=LossScale(value=8))) is staged


def test_a_prepared_model_has_the_models_own_parameters_under_their_own_names() -> None:
    model = model_of("dlrm")
    staged = whole(model, BFLOAT16)
    names = [*model.state_dict()]
    found = prepared(staged, BFLOAT16, compiles=True)
    assert found.model is model
    assert [*model.state_dict()] == names
    before, after = ([id(p) for p in one.stages[0].module.parameters()] for one in (staged, found))
    assert before == after
    assert [name for name, _ in found.parameters_of(0)] == [name for name, _ in staged.parameters_of(0)]


def test_a_stage_equals_its_operators_under_autocast() -> None:
    inner = nn.Linear(4, 2)
    assert DenseStage(inner, BFLOAT16)(torch.ones(3, 4)).dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert DenseStage(inner, Precision())(torch.ones(3, 4)).dtype == torch.float32  # type: ignore[attr-defined]


def test_a_copy_of_a_compiled_stage_uses_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    stage = DenseStage(nn.Linear(2, 1, bias=False), Precision(), Compiler())
    ones = torch.ones(1, 2)
    first = stage(ones)
    twin = copy.deepcopy(stage)
    with torch.no_grad():
        twin.inner.weight.add_(1)
    assert torch.equal(twin(ones), torch.as_tensor(first) + 2)
    assert torch.equal(torch.as_tensor(stage(ones)), torch.as_tensor(first))
