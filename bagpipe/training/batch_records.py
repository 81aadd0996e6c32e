"""`BatchRecord`: what one rank saw of a batch: pooled vectors, their gradients, labels. For `Verification`.

records of each rank that looks rows up ──join_records──> records of whole batches, on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagpipe.distributed.interface import RankGroup

__all__ = ["BatchRecord", "join_records", "keeper"]


@dataclass(slots=True, eq=False)
class BatchRecord:
    """One batch as this rank saw it.

    Attributes:
        size: examples of the global batch.
        labels: with the inputs.
        values: of the embedding stage, in its order.
        gradients: position of a value -> its gradient, times the loss scale.
    """

    size: int
    labels: Tensor
    values: tuple[Tensor, ...] = ()
    gradients: dict[int, Tensor] = field(default_factory=dict)


def keeper(into: dict[int, Tensor], position: int) -> Callable[[Tensor], None]:
    """A hook that copies the gradient of the value at a position."""

    def keep(gradient: Tensor) -> None:
        into[position] = gradient.detach().clone()

    return keep


def join_records(
    own: Mapping[int, BatchRecord],
    batches: Iterable[int],
    device: torch.device,
    group: RankGroup,
    gather: Callable[[Any], list[Any]],
) -> dict[int, BatchRecord]:
    """Records of some batches, with the examples that each rank has, in the order of the ranks."""
    layouts = gather({str(b): _layout(record) for b, record in own.items()})
    found: dict[int, BatchRecord] = {}
    for b in batches:
        parts: list[BatchRecord] = []
        for rank, layout in enumerate(layouts):
            if str(b) in layout:
                part = own[b] if rank == group.rank else _room(layout[str(b)], device)
                for tensor in (part.labels, *part.values, *(part.gradients[key] for key in sorted(part.gradients))):
                    group.broadcast(tensor, rank)
                if part.values:  # a rank without examples looks nothing up
                    parts.append(part)
        keys = sorted({key for part in parts for key in part.gradients})
        found[b] = BatchRecord(
            size=parts[0].size,
            labels=torch.cat([part.labels for part in parts]),
            values=tuple(map(torch.cat, zip(*(part.values for part in parts), strict=True))),
            gradients={
                key: torch.cat([part.gradients.get(key, torch.zeros_like(part.values[key])) for part in parts])
                for key in keys
            },
        )
    return found


def _layout(record: BatchRecord) -> dict[str, Any]:
    """Dtypes and shapes of a record, as JSON."""
    return {
        "size": record.size,
        "labels": _kind(record.labels),
        "values": [_kind(value) for value in record.values],
        "gradients": {str(key): _kind(value) for key, value in record.gradients.items()},
    }


def _room(layout: Mapping[str, Any], device: torch.device) -> BatchRecord:
    """A record that another rank's tensors can be received in."""

    def room(kind: list[Any]) -> Tensor:
        return torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=device)

    return BatchRecord(
        size=layout["size"],
        labels=room(layout["labels"]),
        values=tuple(map(room, layout["values"])),
        gradients={int(key): room(kind) for key, kind in layout["gradients"].items()},
    )


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
