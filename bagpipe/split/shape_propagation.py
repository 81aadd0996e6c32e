"""`propagate_shapes`: shape and kind of every node's result, from runs on fake batches of three sizes.

    Traced ──run on 2, 3, 5 examples──> per node: tensor with a row per example | other tensor | number | opaque (ids)
           ──fold──> numbers become constants or `rows_of` a tensor that their user takes

After folding, only tensors and values made of ids flow between nodes. Modules run in evaluation mode, the random state
is restored, and no row is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bagpipe.errors import InputError
from bagpipe.split.trace import Traced, device_of

__all__ = ["NodeShape", "propagate_shapes", "rows_of"]

#: Numbers of examples: two define a straight line, the third verifies it.
SIZES = (2, 3, 5)

#: Types of results that are folded into their users, besides sizes.
_CONSTANTS = (bool, float, str, torch.dtype, torch.device, torch.layout, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """Shape and kind of a node's result.

    Attributes:
        is_tensor: a tensor whose shape does not depend on ids.
        by_example: the first dimension counts the examples.
        shape: without the examples' dimension; of another tensor: the whole shape for the smallest batch.
        dtype: of a tensor; None for other results.
        wants_grad: gradients of parameters or embeddings flow through the tensor.
    """

    is_tensor: bool = False
    by_example: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    wants_grad: bool = False

    @property
    def elements(self) -> int:
        """Elements per example."""
        return torch.Size(self.shape).numel() if self.by_example else 0


class _Opaque:
    """A value made of ids, unknown without a batch."""


_OPAQUE = _Opaque()


def rows_of(tensor: Tensor, per_example: int, more: int) -> int:
    """``per_example * number of examples + more``, where `tensor` has one row per example."""
    return per_example * tensor.size(0) + more


def propagate_shapes(traced: Traced, *, num_dense: int, dtype: torch.dtype) -> dict[fx.Node, NodeShape]:
    """Shape by node. Folds the numbers in the graph.

    Args:
        traced: its graph is changed where numbers were used.
        num_dense: columns of the dense input.
        dtype: of the dense input and of embeddings.

    Raises:
        InputError: the model fails on a fake batch, or the number of examples enters its arithmetic.
    """
    runs = [_run(traced, size, num_dense, dtype) for size in SIZES]
    dense = next(node for node in traced.graph.nodes if node.op == "placeholder")
    _fold(traced, runs, dense)
    traced.module.recompile()
    return {
        node: _node_shape(node, [run.get(node) for run in runs]) for node in traced.graph.nodes if node.op != "output"
    }


class _FakeRun(fx.Interpreter):
    """Runs the graph without ids: collections return fake vectors."""

    def __init__(self, traced: Traced, num_examples: int, dtype: torch.dtype) -> None:
        super().__init__(traced.module, garbage_collect_values=False)
        self.traced = traced
        self.num_examples = num_examples
        self.dtype = dtype
        self.device = device_of(traced.model)

    def run_node(self, n: fx.Node) -> Any:
        if self.traced.is_collection(n):
            from bagpipe.split.fake_embedding import fake_output

            return fake_output(self.traced.called(n), self.num_examples, self.dtype, self.device)
        if any(self.env[source] is _OPAQUE for source in n.all_input_nodes):
            return None if n.op == "output" else _OPAQUE
        try:
            return super().run_node(n)
        except Exception as error:
            where = self.traced.paths.get(n, n.name)
            raise InputError(
                f"{where}: cannot run on {self.num_examples} fake examples ({' '.join(str(error).split())})"
            ) from error


def _run(traced: Traced, size: int, num_dense: int, dtype: torch.dtype) -> dict[fx.Node, Any]:
    """Result per node for a fake batch of `size` examples."""
    run = _FakeRun(traced, size, dtype)
    fake = torch.zeros(size, num_dense, dtype=dtype, device=run.device)
    modes = {module: module.training for module in traced.module.modules()}
    cuda = [run.device] if run.device.type == "cuda" else []
    try:
        traced.module.eval()
        with torch.random.fork_rng(devices=cuda), torch.enable_grad():
            run.run(fake, _OPAQUE, enable_io_processing=False)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return dict(run.env)


def _node_shape(node: fx.Node, values: list[Any]) -> NodeShape:
    if not all(isinstance(value, Tensor) for value in values):
        return NodeShape()
    shapes = [tuple(value.shape) for value in values]
    by_example = all(
        shape[:1] == (size,) and shape[1:] == shapes[0][1:] for shape, size in zip(shapes, SIZES, strict=True)
    )
    return NodeShape(
        is_tensor=True,
        by_example=by_example,
        shape=shapes[0][1:] if by_example else shapes[0],
        dtype=values[0].dtype,
        wants_grad=values[0].requires_grad and not isinstance(values[0], nn.Parameter),
    )


def _fold(traced: Traced, runs: list[dict[fx.Node, Any]], dense: fx.Node) -> None:
    """Replace numbers and sizes in the arguments of all other nodes."""
    numbers = {node for node in traced.graph.nodes if node in runs[0] and _is_number([run[node] for run in runs])}
    for node in list(traced.graph.nodes):
        if node in numbers or not numbers.intersection(node.all_input_nodes):
            continue
        anchor = next((n for n in node.all_input_nodes if _by_example([run[n] for run in runs])), dense)

        def folded(source: fx.Node, node: fx.Node = node, anchor: fx.Node = anchor) -> Any:
            if source not in numbers:
                return source
            with traced.graph.inserting_before(node):
                return _folded(traced, source, [run[source] for run in runs], anchor, runs)

        node.args = fx.map_arg(node.args, folded)
        node.kwargs = fx.map_arg(node.kwargs, folded)
    for node in reversed(list(traced.graph.nodes)):
        if node in numbers and not node.users:
            traced.graph.erase_node(node)


def _folded(traced: Traced, source: fx.Node, values: list[Any], anchor: fx.Node, runs: list[dict[fx.Node, Any]]) -> Any:
    if all(value == values[0] for value in values):
        return tuple(values[0]) if isinstance(values[0], torch.Size) else values[0]
    if isinstance(values[0], (tuple, list)) and len({len(value) for value in values}) == 1:
        return tuple(_folded(traced, source, list(items), anchor, runs) for items in zip(*values, strict=True))
    if isinstance(values[0], int):
        slope, rest = divmod(values[1] - values[0], SIZES[1] - SIZES[0])
        start = values[0] - slope * SIZES[0]
        if not rest and all(slope * size + start == value for size, value in zip(SIZES, values, strict=True)):
            made = traced.graph.call_function(rows_of, (anchor, slope, start))
            for run, value in zip(runs, values, strict=True):
                run[made] = value
            return made
    raise InputError(
        f"{traced.paths[source]}: computes with the number of examples, so it cannot be cut into micro-batches; "
        f"expected a multiple of it or a constant, got {values} for {list(SIZES)} examples"
    )


def _is_number(values: list[Any]) -> bool:
    """Whether the results are sizes, constants, or tuples of them."""
    first = values[0]
    if isinstance(first, (tuple, list)):
        return bool(first) and all(_is_number([item]) for item in first)
    return isinstance(first, (int, *_CONSTANTS))


def _by_example(values: list[Any]) -> bool:
    return all(isinstance(v, Tensor) and v.shape[:1] == (size,) for v, size in zip(values, SIZES, strict=True))
