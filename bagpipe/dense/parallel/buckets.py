"""`Bucket`: gradients of several parameters that ranks sum together, in one buffer.

    gradients ──fill──> given ─all-to-all: chunk r of every rank's bucket to rank r─> taken
        rank r: chunk = ((first's + second's) + third's) + …
        given <─all-gather: every rank has every chunk─ chunk        given ──copy_back──> gradients

Rule of this file: *every element is summed in one order of the ranks, alone.* So the sum does not depend on how
parameters are cut into buckets, all ranks get the same bits, and the volume is that of a ring all-reduce. Gradients are
summed, not averaged: the loss is divided by the number of examples of the global batch already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["BUCKET_BYTES", "Bucket", "check_gradient", "make_buckets"]

#: Large enough for a network's bandwidth, small enough to start under the backward; torch's own are 1 and 25 MiB.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        names, parameters: in the order in which backward is expected to reach them.
        given: flat, their gradients, then one flag each (it has a gradient here), one more for whatever the ranks want
            to count (`mark`), then padding to a multiple of the ranks; after the exchange the sums of all that.
        taken: as large: every rank's contribution to this rank's chunk.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    given: Tensor
    taken: Tensor

    def fill(self) -> None:
        """Copy the gradients in; zeros where there is none.

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
        self._flags().copy_(torch.tensor(flags, dtype=self.given.dtype), non_blocking=True)

    def mark(self, is_set: bool) -> None:
        """Set this rank's own flag; after `fill`, before `exchange`."""
        self._mark().fill_(float(is_set))

    def is_marked(self) -> bool:
        """After `exchange`: some rank has set its flag. Waits for the device."""
        return bool(self._mark().item() > 0)

    def exchange(self, group: RankGroup, order: Sequence[int]) -> None:
        """Make the contents the sums over a group.

        Args:
            order: positions in the group, each once: the order of the sums, the same on all ranks.

        Raises:
            PeerError: a peer is gone or silent.
        """
        num_ranks = group.world_size
        chunk = len(self.given) // num_ranks
        group.all_to_all(self.taken, self.given, [chunk] * num_ranks, [chunk] * num_ranks)
        contributions = self.taken.view(num_ranks, chunk)
        total = contributions[order[0]]
        for position in order[1:]:
            total.add_(contributions[position])
        group.all_gather(self.given, total)

    def copy_back(self) -> None:
        """Give the sums to the parameters; one that has a gradient on no rank keeps none."""
        somewhere: list[float] = []
        for number, (_, parameter, part) in enumerate(self._parts()):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
                continue
            # Only now: reading the flags waits for the device, and a rank that has all gradients need not know.
            somewhere = somewhere or self._flags().tolist()
            if somewhere[number]:
                parameter.grad = part.clone()

    def _parts(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every parameter with its name and its place in `given`."""
        first = 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            yield name, parameter, self.given[first : first + parameter.numel()].view(parameter.shape)
            first += parameter.numel()

    def _flags(self) -> Tensor:
        first = sum(parameter.numel() for parameter in self.parameters)
        return self.given[first : first + len(self.parameters)]

    def _mark(self) -> Tensor:
        first = sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)
        return self.given[first]


def check_gradient(name: str, parameter: Tensor) -> None:
    """Raise InputError if a parameter's gradient is a sparse one."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise InputError(f"model parameter {name}: expected a dense gradient, got a {parameter.grad.layout} one")


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int, num_ranks: int
) -> tuple[Bucket, ...]:
    """Cut trainable parameters, last first as backward reaches them, into runs of one dtype and so many bytes.

    Args:
        parameters: with their names; those that want no gradient are left out.
        bucket_bytes: gradients that travel together, at most (one parameter at least).
        num_ranks: of the group that sums them.
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
    given = parameters[0].new_zeros(-(-length // num_ranks) * num_ranks, requires_grad=False)
    return Bucket(names=names, parameters=parameters, given=given, taken=torch.zeros_like(given))
