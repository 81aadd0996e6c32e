"""What nodes call, and which of them overwrite their argument."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional

from bagpipe.split.calls import function_name, is_in_place


def test_names_and_in_place() -> None:
    graph = fx.Graph()
    taken = graph.placeholder("x")
    nodes = {
        graph.call_method("relu_", (taken,)): ("relu_", True),
        graph.call_method("relu", (taken,)): ("relu", False),
        graph.call_method("__add__", (taken, 1)): ("__add__", False),
        graph.call_function(functional.relu, (taken,), {"inplace": True}): ("relu", True),
        graph.call_function(functional.relu, (taken,), {"inplace": False}): ("relu", False),
        graph.call_function(torch.relu_, (taken,)): ("relu_", True),
        graph.call_function(operator.iadd, (taken, 1)): ("iadd", True),
        graph.call_function(operator.add, (taken, 1)): ("add", False),
    }
    for node, (name, changes) in nodes.items():
        assert (function_name(node), is_in_place(node, None)) == (name, changes)
    called = graph.create_node("call_module", "layer", (taken,))
    assert function_name(called) == ""
    assert is_in_place(called, nn.ReLU(inplace=True))
    assert not is_in_place(called, nn.ReLU())
