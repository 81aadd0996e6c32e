"""`Bucket`: flat buffer of several parameters' gradients for a deterministic all-reduce.

    gradients ──fill──> buffer ─all-to-all: chunk r of every rank's bucket to rank r─> received
        rank r: chunk = ((first's + second's) + third's) + …
        buffer <─all-gather: every rank has every chunk─ chunk        buffer ──copy_back──> gradients

Each element is summed on its own, in one fixed order of the ranks. The sum therefore does not depend on the cut into
buckets, all ranks get the same bits, and the volume equals a ring all-reduce. Gradients are summed, not averaged: the
loss is already divided by the number of examples in the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["BUCKET_BYTES", "Bucket", "add_up", "check_gradient", "is_bad_anywhere", "make_buckets"]

#: Large enough for a network's bandwidth, small enough to overlap the backward. torch uses 1 and 25 MiB.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients are exchanged together.

    Attributes:
        names, parameters: in the expected order of the backward.
        buffer: flat: gradients, one flag per parameter (it has a gradient here), one mark (`mark`), padding to a
            multiple of the ranks. The exchange replaces all of it by the sums.
        received: same size: every rank's contribution to this rank's chunk.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor
    received: Tensor

    def fill(self) -> None:
        """Copy the gradients in; zeros for a missing one.

        Raises:
            InputError: a gradient is sparse.
        """
        flags = []
        for name, parameter, part in self._parts():
            flags.append(parameter.grad is not None)
            if parameter.grad is None:
                part.zero_()
            else:
                check_gradient(name, parameter)
                part.copy_(parameter.grad)
        self._flags().copy_(torch.tensor(flags, dtype=self.buffer.dtype), non_blocking=True)

    def mark(self, is_set: bool) -> None:
        """Set this rank's mark; between `fill` and `exchange`."""
        self._mark().fill_(float(is_set))

    def is_marked(self) -> bool:
        """Whether any rank has set its mark; after `exchange`. Synchronizes with the device."""
        return bool(self._mark().item() > 0)

    def exchange(self, group: RankGroup, order: Sequence[int]) -> None:
        """All-reduce the buffer with SUM.

        Args:
            group: the ranks that contribute.
            order: the group's positions in the order of the sum, equal on all ranks; those that are left out have no
                gradient and send none.

        Raises:
            PeerError: a peer is gone or silent.
        """
        num_ranks = group.world_size
        chunk = len(self.buffer) // num_ranks
        gives = len(order) == num_ranks or group.rank in order
        taken = [chunk if position in order else 0 for position in range(num_ranks)]
        sent = [chunk if gives else 0] * num_ranks
        group.all_to_all(self.received[: sum(taken)], self.buffer[: sum(sent)], taken, sent)
        contributions = dict(zip(sorted(order), self.received[: sum(taken)].view(-1, chunk), strict=True))
        reduced = contributions[order[0]]
        for position in order[1:]:
            reduced.add_(contributions[position])
        group.all_gather(self.buffer, reduced)

    def copy_back(self) -> None:
        """Copy the sums to the gradients. A parameter without a gradient on any rank keeps none."""
        num_gradients: list[float] = []
        for number, (_, parameter, part) in enumerate(self._parts()):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
                continue
            # Lazy: reading the flags synchronizes with the device, and a rank with all gradients does not need them.
            num_gradients = num_gradients or self._flags().tolist()
            if num_gradients[number]:
                parameter.grad = part.clone()

    def _parts(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Name, parameter and its view in `buffer`, per parameter."""
        first = 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            yield name, parameter, self.buffer[first : first + parameter.numel()].view(parameter.shape)
            first += parameter.numel()

    def _flags(self) -> Tensor:
        first = sum(parameter.numel() for parameter in self.parameters)
        return self.buffer[first : first + len(self.parameters)]

    def _mark(self) -> Tensor:
        first = sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)
        return self.buffer[first]


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raise InputError if a parameter's gradient is sparse."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise InputError(f"model parameter {name}: expected a dense gradient, got a {parameter.grad.layout} one")


def is_bad_anywhere(group: RankGroup, is_bad: bool) -> bool:
    """Whether any rank's batch is bad, of a model without gradients that could carry a mark. All ranks call it.

    Raises:
        PeerError: a peer is gone or silent.
    """
    flags = torch.zeros(group.world_size)
    group.all_gather(flags, torch.full((1,), float(is_bad)))
    return bool(flags.any())


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int, num_ranks: int
) -> tuple[Bucket, ...]:
    """Cut trainable parameters, last first as the backward reaches them, into buckets of one dtype and bounded size.

    Args:
        parameters: with their names. Those without `requires_grad` are skipped.
        bucket_bytes: largest size of a bucket; a larger parameter gets its own.
        num_ranks: size of the group that sums them.
    """
    runs: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for name, parameter in reversed(trainable):
        size += parameter.nbytes
        if not runs or size > bucket_bytes or runs[-1][0][1].dtype != parameter.dtype:
            runs.append([])
            size = parameter.nbytes
        runs[-1].append((name, parameter))
    return tuple(_bucket(run, num_ranks) for run in runs)


def _bucket(run: Sequence[tuple[str, nn.Parameter]], num_ranks: int) -> Bucket:
    names, parameters = zip(*run, strict=True)
    length = sum(parameter.numel() for parameter in parameters) + len(parameters) + 1
    buffer = parameters[0].new_zeros(-(-length // num_ranks) * num_ranks, requires_grad=False)
    return Bucket(names=names, parameters=parameters, buffer=buffer, received=torch.zeros_like(buffer))


def add_up(group: RankGroup, vector: Tensor) -> Tensor:
    """The sum of the ranks' vectors, in rank order: equal bits on all of them, which all call it.

    Raises:
        PeerError: a peer is gone or silent.
    """
    gathered = vector.new_empty(group.world_size * vector.numel())
    group.all_gather(gathered, vector)
    rows = gathered.view(group.world_size, -1)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
