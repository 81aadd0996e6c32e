"""`SavesAll`: what compiled code saves of its forward: all that its backward reads, as autograd does.

inductor computes cheap values of the forward again in the backward. A backward with other weights than its forward
would compute other values. This module imports inductor, which takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._functorch.partitioners import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

__all__ = ["SavesAll"]


class SavesAll(CustomPartitionerFn):
    """Divides the operators of forward and backward into two graphs, each operator where autograd has it."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        del kwargs["compiler"]  # the division is the same for all
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "bagpipe.SavesAll"
