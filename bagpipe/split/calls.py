"""What a node of a traced graph calls, as far as its name tells: which function, and whether it changes its argument.

node ──function_name──> "relu_"        node, module it calls ──is_in_place──> its first argument is overwritten
"""

from __future__ import annotations

from torch import fx, nn

__all__ = ["function_name", "is_in_place"]

_IN_PLACE_OPERATORS = frozenset(
    {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul", "setitem"}
)


def function_name(node: fx.Node) -> str:
    """Name of the function or method that a node calls; empty: it calls none."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def is_in_place(node: fx.Node, called: nn.Module | None) -> bool:
    """Whether a node changes its first argument.

    Args:
        node: of a traced graph.
        called: the module that it calls, if it calls one.
    """
    name = function_name(node)
    return (
        bool(getattr(called, "inplace", False))
        or bool(node.kwargs.get("inplace", False))
        or (name.endswith("_") and not name.endswith("__"))
        or (getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE_OPERATORS)
    )
