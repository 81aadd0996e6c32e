"""`KfacExchange`: what the holders of some layers send each other: sums of factors, preconditioned gradients.

add_up      sums of every layer ──all-to-all──> its owner, which adds them in rank order
share       preconditioned gradients, sizes of steps ──broadcast of one buffer per owner──> all holders
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bagpipe.dense.precondition.factors import BatchSums
from bagpipe.dense.precondition.layers import LinearLayer
from bagpipe.distributed.interface import RankGroup

__all__ = ["KfacExchange"]


class KfacExchange:
    """Exchanges among the holders of some layers. One thread of every holder makes the same calls.

    Args:
        group: the holders.
        layers: the layers.
        owners: position in the group of each layer's owner.
    """

    def __init__(self, group: RankGroup, layers: Sequence[LinearLayer], owners: Sequence[int]) -> None:
        self._group = group
        self._layers = tuple(layers)
        self._owners = tuple(owners)

    def add_up(self, sums: Mapping[int, BatchSums]) -> dict[int, BatchSums]:
        """Sums over the examples of all holders.

        Args:
            sums: by layer, over this rank's examples; a missing layer has none.

        Returns:
            Of the layers that this rank owns.

        Raises:
            PeerError: a peer is gone or silent.
        """
        ranks = range(self._group.world_size)
        sent = [[self._flat(sums.get(number), number) for number in self._owned(rank)] for rank in ranks]
        lengths = [sum(len(flat) for flat in flats) for flats in sent]
        own = lengths[self._group.rank]
        like = self._like()
        given = torch.cat([like, *(flat for flats in sent for flat in flats)])
        received = like.new_empty(own * self._group.world_size)
        self._group.all_to_all(received, given, [own] * self._group.world_size, lengths)
        parts = received.view(self._group.world_size, own)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return self._unflat(total)

    def share(self, gradients: Sequence[Tensor | None], sizes: Tensor) -> list[Tensor | None]:
        """The owners' preconditioned gradients, on every holder.

        Args:
            gradients: by layer ``[num_outputs, num_inputs]``; None: the layer has none, on any holder. Those of layers
                that others own are replaced.
            sizes: ``[layers]``, of each own layer; filled for the others.

        Raises:
            PeerError: a peer is gone or silent.
        """
        found = list(gradients)
        for rank in range(self._group.world_size):
            numbers = [number for number in self._owned(rank) if gradients[number] is not None]
            if not numbers:
                continue
            given = [found[number] for number in numbers]
            buffer = torch.cat([*(each.reshape(-1) for each in given if each is not None), sizes[numbers]])
            self._group.broadcast(buffer, rank)
            first = 0
            for number, each in zip(numbers, given, strict=True):
                assert each is not None, "left out before"
                found[number] = buffer[first : first + each.numel()].view(each.shape)
                first += each.numel()
            sizes[numbers] = buffer[first:]
        return found

    def _owned(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == rank]

    def _like(self) -> Tensor:
        layer = self._layers[0]
        return BatchSums.zeros(0, 0, layer.weight).inputs.reshape(-1)

    def _flat(self, sums: BatchSums | None, number: int) -> Tensor:
        layer = self._layers[number]
        own = BatchSums.zeros(layer.num_inputs, layer.num_outputs, layer.weight) if sums is None else sums
        counts = own.counts.to(own.inputs.dtype).to(own.inputs.device)
        return torch.cat([own.inputs.reshape(-1), own.outputs.reshape(-1), counts])

    def _unflat(self, flat: Tensor) -> dict[int, BatchSums]:
        found: dict[int, BatchSums] = {}
        first = 0
        for number in self._owned(self._group.rank):
            a, g = self._layers[number].num_inputs, self._layers[number].num_outputs
            inputs, outputs, counts = torch.split(flat[first : first + a * a + g * g + 2], [a * a, g * g, 2])
            found[number] = BatchSums(
                inputs=inputs.view(a, a), outputs=outputs.view(g, g), counts=counts.to("cpu", torch.float64)
            )
            first += a * a + g * g + 2
        return found
