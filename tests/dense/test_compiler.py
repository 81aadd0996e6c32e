"""Compilation: once per number of examples, equal bits on backends that preserve them, and refusals."""

from __future__ import annotations

import threading
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch

from bagpipe.dense import compiler as compiled
from bagpipe.dense import seeding
from bagpipe.dense.compiler import Compiler, check_compiler
from bagpipe.dense.executor import EagerExecutor, SplitExecutor
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import prepared
from bagpipe.errors import InputError
from tests.dense.small import SIZES, model_of, train, whole

CPU = torch.device("cpu")


def test_one_compilation_per_number_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller last batch changes neither the others' code nor their results. Parameter names are the model's."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.append(tuple(torch.as_tensor(inputs[-1]).shape))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    model = model_of("dlrm")
    expected = train(model, EagerExecutor(model), (*SIZES, *SIZES))
    model = model_of("dlrm")
    losses, state = train(
        model, SplitExecutor(prepared(whole(model), Precision(), compiles=True), Precision()), (*SIZES, *SIZES)
    )
    assert len(shapes) == len(set(SIZES))
    assert losses == expected[0]
    assert state.keys() == expected[1].keys()
    assert all(torch.equal(state[name], value) for name, value in expected[1].items())


def test_calls_leave_nothing_behind_in_the_context_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    module, call = torch.nn.Linear(2, 2), Compiler()
    call(module, torch.ones(1, 2))
    before = len(copy_context())
    for _ in range(5):
        call(module, torch.ones(1, 2))
    assert len(copy_context()) == before


def test_nothing_compiles_while_another_lane_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch restores the generator's state after it has compiled; a draw of another thread would be repeated."""
    entered: list[bool] = []

    def enter() -> None:
        entered.append(seeding._GENERATOR.acquire(blocking=False))

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        lane = threading.Thread(target=enter)
        lane.start()
        lane.join()
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    model = model_of("dlrm")
    train(model, SplitExecutor(prepared(whole(model), Precision(), compiles=True), Precision()), SIZES)
    assert entered == [False] * len(set(SIZES))
    assert seeding._GENERATOR.acquire(blocking=False)
    seeding._GENERATOR.release()


def test_only_inductor_gets_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = compiled._options()
    assert options == {"deterministic": True}
    assert options.keys() <= set(torch._inductor.list_options())
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    assert compiled._options() is None


def test_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_compiler(CPU)
    monkeypatch.setenv("CXX", "a-compiler-of-ours")
    with pytest.raises(InputError, match=r"^run.compile needs a C\+\+ compiler \(a-compiler-of-ours\) on PATH"):
        check_compiler(CPU)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"^run.compile needs a C\+\+ compiler \(g\+\+ or "):
        check_compiler(CPU)


def test_no_triton_is_refused_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^run.compile needs triton for run.device cuda:0"):
        check_compiler(torch.device("cuda:0"))
