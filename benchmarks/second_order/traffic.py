"""`Traffic`: bytes that this rank sends to other ranks in a job, by what they carry.

LaneGroup ──patched──> bytes by the lane's name: rows and their gradients, sums of gradients, activations between stages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bagpipe.distributed.collectives import LaneGroup

__all__ = ["Traffic"]

#: Beginning of a lane's name -> what it carries.
_KINDS = (("pull", "rows"), ("push", "row gradients"), ("dense", "sums"), ("sums", "sums"), ("links", "activations"))


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes so far, by what they carry."""

    sent: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count from here on."""
        all_to_all, all_gather, send = LaneGroup.all_to_all, LaneGroup.all_gather, LaneGroup.send

        def exchanged(
            group: LaneGroup, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]
        ) -> None:
            others = sum(input_rows) - input_rows[group.rank]
            self._add(group, others * input.element_size() * (input[:1].numel() or 1))
            all_to_all(group, output, input, output_rows, input_rows)

        def gathered(group: LaneGroup, output: Tensor, input: Tensor) -> None:
            self._add(group, input.numel() * input.element_size() * (group.world_size - 1))
            all_gather(group, output, input)

        def sent(group: LaneGroup, tensor: Tensor, to: int, tag: int) -> Any:
            self._add(group, tensor.numel() * tensor.element_size())
            return send(group, tensor, to, tag)

        with ExitStack() as stack:
            for name, call in (("all_to_all", exchanged), ("all_gather", gathered), ("send", sent)):
                stack.enter_context(patch.object(LaneGroup, name, call))
            yield

    def per_step(self, steps: int) -> dict[str, float]:
        """Bytes of a step."""
        return {kind: count / steps for kind, count in sorted(self.sent.items())}

    def _add(self, group: LaneGroup, count: int) -> None:
        kind = next((kind for name, kind in _KINDS if group.name.startswith(name)), group.name)
        self.sent[kind] = self.sent.get(kind, 0) + count
