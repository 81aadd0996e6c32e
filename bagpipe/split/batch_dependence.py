"""`batch_dependent_operators`: operators whose result for one example depends on others, which micro-batches change.

    stage on 4 random examples ──compare, node by node──> the same stage on 1 of them, and on the other 3

Batch norms are found by class (`trace.batch_dependent_modules`). This test finds the rest: a mean over the batch, a
softmax along it, a division by its size. It uses random inputs, so it can miss an operator that rarely mixes examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from bagpipe.split.split import RANDOM_FUNCTIONS
from bagpipe.split.staged_model import StagedModel
from bagpipe.split.trace import device_of, function_name

__all__ = ["batch_dependent_operators"]

#: Examples of the test batch, and of its first part.
SIZE, CUT = 4, 1

#: Element size of a dtype -> tolerance relative to the largest result, since the order of sums can change.
_TOLERANCES = {8: 1e-9, 4: 1e-3, 2: 5e-2, 1: 2e-1}


def batch_dependent_operators(staged: StagedModel) -> tuple[str, ...]:
    """Per stage that mixes examples, its first node that does, as ``stage: node``. The model does not change."""
    return tuple(
        f"{stage.name}: {found}"
        for number, stage in enumerate(staged.stages)
        if (found := _first_batch_dependent(staged, number)) is not None
    )


def _first_batch_dependent(staged: StagedModel, number: int) -> str | None:
    stage = staged.stages[number]
    assert isinstance(stage.module, fx.GraphModule)
    draw = torch.Generator().manual_seed(number)
    inputs = []
    for n in stage.inputs:
        value = staged.values[n]
        drawn = torch.randn(SIZE, *value.shape, generator=draw)
        inputs.append(drawn.to(device_of(staged.model), value.dtype))
    whole = _results(stage.module, inputs)
    first = _results(stage.module, [tensor[:CUT] for tensor in inputs])
    rest = _results(stage.module, [tensor[CUT:] for tensor in inputs])
    for node, result in whole.items():
        if not isinstance(result, Tensor) or result.shape[:1] != (SIZE,):
            continue
        if not _near(result, torch.cat([first[node], rest[node]])):
            return str(node.target) if node.op == "call_module" else node.name
    return None


class _Recorder(fx.Interpreter):
    """Random functions return their input, or zeros: they differ between calls, whatever the examples."""

    def run_node(self, n: fx.Node) -> Any:
        if function_name(n).rstrip("_") in RANDOM_FUNCTIONS:
            taken = [self.env[source] for source in n.all_input_nodes if isinstance(self.env[source], Tensor)]
            return taken[0] if taken else torch.zeros_like(super().run_node(n))
        return super().run_node(n)


def _results(module: fx.GraphModule, inputs: list[Tensor]) -> dict[fx.Node, Any]:
    """Result per node, in evaluation mode."""
    modes: dict[nn.Module, bool] = {part: part.training for part in module.modules()}
    recorder = _Recorder(module, garbage_collect_values=False)
    try:
        module.eval()
        with torch.no_grad():
            recorder.run(*(tensor.clone() for tensor in inputs), enable_io_processing=False)
    finally:
        for part, mode in modes.items():
            part.training = mode
    # A node that only reads a parameter has the parameter itself, which keeps its history.
    return {
        node: value.detach() if isinstance(value, Tensor) else value
        for node, value in recorder.env.items()
        if node.op not in ("placeholder", "output")
    }


def _near(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return bool(torch.equal(left, right))
    scale = float(left.abs().nan_to_num(0).max()) if left.numel() else 0.0
    tolerance = _TOLERANCES[left.element_size()] * scale
    return bool(torch.allclose(left, right, rtol=0, atol=tolerance, equal_nan=True))
