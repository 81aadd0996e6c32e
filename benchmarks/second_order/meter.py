"""Bytes that K-FAC really sends and keeps in a job on several ranks, beside its formulas.

whole_kfac(model, config, group) ──group──> CountedGroup: bytes to other ranks     Kfac.tensors ──> bytes kept
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.kfac import Kfac
from bagpipe.dense.precondition.layers import LinearLayer
from bagpipe.distributed.interface import RankGroup

__all__ = ["CountedGroup", "KfacMeter"]

#: Tensors of a layer's state that `kept_bytes` counts.
_KEPT = ("factor_a", "factor_g", "inverse_a", "inverse_g")


class CountedGroup:
    """A group of ranks that counts the bytes that this one sends to others, as `sent_bytes` counts them.

    Args:
        group: sends.

    Attributes:
        sent_bytes: of all-to-alls and broadcasts so far.
    """

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.sent_bytes = 0
        self._group = group

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        others = sum(input_rows) - input_rows[self.rank]
        self.sent_bytes += others * input.element_size() * input[:1].numel()
        self._group.all_to_all(output, input, output_rows, input_rows)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        self.sent_bytes += input.numel() * input.element_size() * (self.world_size - 1)
        self._group.all_gather(output, input)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if root == self.rank:
            self.sent_bytes += tensor.numel() * tensor.element_size() * (self.world_size - 1)
        self._group.broadcast(tensor, root)


@dataclass(slots=True, kw_only=True)
class KfacMeter:
    """Watches the K-FAC of the job that runs here. Its attributes are None and empty without one."""

    kfac: Kfac | None = None
    group: CountedGroup | None = None
    layers: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count from here on."""
        open_exchange, make = KfacExchange.__init__, Kfac.__init__

        def opened(exchange: KfacExchange, group: RankGroup, *rest: Any) -> None:
            self.group = CountedGroup(group)
            open_exchange(exchange, self.group, *rest)

        def made(kfac: Kfac, layers: Sequence[LinearLayer], *rest: Any, **named: Any) -> None:
            self.kfac = kfac
            self.layers = [(layer.num_inputs, layer.num_outputs) for layer in layers]
            make(kfac, layers, *rest, **named)

        with patch.object(KfacExchange, "__init__", opened), patch.object(Kfac, "__init__", made):
            yield

    def found(self, steps: int) -> dict[str, Any]:
        """Bytes sent in a step by this rank, bytes it keeps, and the dimensions of all layers' factors."""
        if self.kfac is None:
            return {}
        state = self.kfac.tensors(steps).items()
        kept = sum(value.numel() * value.element_size() for name, value in state if name.rpartition(".")[2] in _KEPT)
        sent = 0 if self.group is None else self.group.sent_bytes
        return {"sent_bytes": sent / steps, "kept_bytes": kept, "layers": self.layers}
