"""Models with parts that torch.compile has compiled, or compiled as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of

#: torch's tracer reads the gradient of its inputs, and silences the warning only where it would be shown.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

#: Both trace the model as for inductor; torch's own operators compute it.
BACKENDS = ("eager", "aot_eager")


def _part(model: Small, backend: str) -> nn.Module:
    model.over = torch.compile(model.over, backend=backend)  # type: ignore[assignment]
    return model


def _part_in_place(model: Small, backend: str) -> nn.Module:
    model.over.compile(backend=backend)
    return model


def _collection(model: Small, backend: str) -> nn.Module:
    model.bags = torch.compile(model.bags, backend=backend)
    return model


def _whole(model: Small, backend: str) -> nn.Module:
    whole: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
    return whole


def _whole_in_place(model: Small, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def _trained(compiled: Callable[[Small], nn.Module], **more: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """State by the names of the plain model, and losses."""
    model = Small()
    with pipeline(model, compiled=compiled(model), **more) as trained:
        losses = progress_all(trained, iter(batches(6)))
        return {name.replace("_orig_mod.", ""): value for name, value in state_of(trained).items()}, losses


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compile_it", [_part, _part_in_place, _collection, _whole, _whole_in_place])
def test_compiled_parts_train_as_the_plain_model(compile_it: Callable[[Small, str], nn.Module], backend: str) -> None:
    state, losses = _trained(lambda model: compile_it(model, backend))
    plain, plain_losses = _trained(lambda model: model)
    assert_same(state, plain)
    assert torch.equal(torch.stack(losses), torch.stack(plain_losses))


def test_a_model_compiled_after_the_pipeline_is_made_trains_alike() -> None:
    with pipeline() as trained:
        trained.model.compile(backend="eager")
        progress_all(trained, iter(batches(6)))
        assert_same(state_of(trained), _trained(lambda model: model)[0])


def test_a_compiled_model_scores_in_the_middle_of_training() -> None:
    model = Small()
    with pipeline(model, compiled=_whole(model, "eager")) as trained:
        iterator = iter(batches(6))
        trained.progress(iterator)
        scores = list(trained.evaluate(batches(2, seed=4)))
        progress_all(trained, iterator)
        state = {name.replace("_orig_mod.", ""): value for name, value in state_of(trained).items()}
    assert [tuple(score.shape) for score in scores] == [(8,), (8,)]
    assert_same(state, _trained(lambda model: model)[0])


def test_a_lookup_in_one_graph_with_the_dense_part_is_refused_before_anything_changes() -> None:
    model = Small()
    with pipeline(model, compiled=torch.compile(model, backend="eager", fullgraph=True)) as trained:
        before = model.over.weight.detach().clone()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="looked up outside of compiled code"):
            trained.progress(iter(batches(1)))
    assert torch.equal(model.over.weight, before)


# torch's inductor imports functions that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_code_keeps_direct_modes_bits() -> None:
    cached, losses = _trained(lambda model: _part(model, "inductor"))
    direct, direct_losses = _trained(lambda model: _part(model, "inductor"), cache_rows=0)
    assert_same(cached, direct)
    assert torch.equal(torch.stack(losses), torch.stack(direct_losses))
    plain = _trained(lambda model: model)[0]
    for name, value in cached.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6)
