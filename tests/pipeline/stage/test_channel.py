from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.batches import flow, part_intervals
from bagpipe.pipeline.stage.channel import Channel, Link, MicrobatchSlice, owned
from bagpipe.split.staged_model import StageValue


@dataclass
class ManualLinks:
    """Links with hand-made messages and a log of every call and wait."""

    log: list[str] = field(default_factory=list)
    receiving: list[Tensor] = field(default_factory=list)

    def send(self, process: int, tag: int, tensor: Tensor) -> Waiting:
        self.log.append(f"send {list(tensor.shape)} to {process}, tag {tag}")
        return Waiting(self, "sent")

    def receive(self, process: int, tag: int, tensor: Tensor) -> Waiting:
        self.log.append(f"receive {list(tensor.shape)} from {process}, tag {tag}")
        self.receiving.append(tensor)
        return Waiting(self, "received")


@dataclass
class Waiting:
    pile: ManualLinks
    what: str

    def wait(self) -> None:
        self.pile.log.append(f"waited, {self.what}")


def channel(*, units: int = 2, receiver_units: int = 2, copies: bool = False, link: Link | None = None) -> Channel:
    values = tuple(
        StageValue(name=name, producer=0, consumers=(1,), shape=(width,), dtype=dtype, wants_grad=True)
        for name, width, dtype in (("a", 3, torch.float64), ("b", 1, torch.float32))
    )
    return Channel(
        number=0,
        sender=0,
        receiver=1,
        pipe=0,
        numbers=(4, 7),
        values=values,
        units=units,
        receiver_units=receiver_units,
        copies=copies,
        link=link,
        device=torch.device("cpu"),
    )


def tensors(examples: int) -> list[Tensor]:
    return [torch.arange(3.0 * examples).double().view(-1, 3), torch.arange(1.0 * examples).view(-1, 1)]


def test_a_whole_micro_batch_is_not_copied() -> None:
    edge, given = channel(), tensors(4)
    edge.put(3, given, 1)
    taken = edge.take(2, [MicrobatchSlice(1, 0, 4, True)])
    assert all(a is b for a, b in zip(taken, given, strict=True))
    with pytest.raises(KeyError):
        edge.take(2, [MicrobatchSlice(1, 0, 4, True)])


def test_a_part_is_a_copy_at_the_start_of_its_memory() -> None:
    edge, given = channel(units=1), tensors(4)
    edge.put(0, given, 2)
    second = edge.take(0, [MicrobatchSlice(0, 2, 4, False)])
    assert torch.equal(second[0], given[0][2:])
    assert all(tensor.storage_offset() == 0 and tensor.is_contiguous() for tensor in second)
    first = edge.take(0, [MicrobatchSlice(0, 0, 2, False)])
    assert torch.equal(torch.cat([first[0], second[0]]), given[0])


def test_parts_of_several_are_put_together() -> None:
    edge = channel(units=3)
    whole = tensors(9)
    slices = flow(part_intervals(9, 3), part_intervals(9, 2)).slices
    for unit in range(3):
        rows = slice(3 * unit, 3 * unit + 3)
        edge.put(unit, [tensor[rows] for tensor in whole], sum(p.unit == unit for of_unit in slices for p in of_unit))
    found = [edge.take(0, of_unit) for of_unit in slices]
    assert torch.equal(torch.cat([taken[0] for taken in found]), whole[0])
    assert torch.equal(torch.cat([taken[1] for taken in found]), whole[1])


def test_consumers_of_pooled_values_get_copies() -> None:
    edge, given = channel(units=1, receiver_units=1, copies=True), tensors(2)
    edge.put(0, given, 1)
    taken = edge.take(0, [MicrobatchSlice(0, 0, 2, True)])
    assert torch.equal(taken[0], given[0])
    assert taken[0].data_ptr() != given[0].data_ptr()


def test_sends_are_waited_for_only_in_wait_sends() -> None:
    pile = ManualLinks()
    edge = channel(link=Link(pile, 2, 5))
    edge.put(0, tensors(4), 1)
    edge.send(0)
    edge.send(1)  # an empty micro-batch: nothing was put
    assert pile.log == ["send [4, 3] to 2, tag 5", "send [4, 1] to 2, tag 5"]
    edge.wait_sent(1)
    edge.wait_sent(0)
    edge.wait_all_sent(1000)
    assert pile.log[2:] == ["waited, sent"] * 2


def test_a_receive_is_waited_for_where_its_value_is_taken() -> None:
    pile = ManualLinks()
    edge = channel(link=Link(pile, 2, 5))
    edge.receive(0, 4, 1)
    assert pile.log == ["receive [4, 3] from 2, tag 5", "receive [4, 1] from 2, tag 5"]
    assert [tensor.dtype for tensor in pile.receiving] == [torch.float64, torch.float32]
    taken = edge.take(0, [MicrobatchSlice(0, 0, 4, True)])
    assert pile.log[2:] == ["waited, received"] * 2
    assert all(a is b for a, b in zip(taken, pile.receiving, strict=True))


def test_a_value_of_another_shape_than_announced_is_not_sent() -> None:
    edge = channel(link=Link(ManualLinks(), 2, 5))
    edge.put(0, [torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 1)], 1)
    with pytest.raises(JobError, match=r"expected a as torch.float64 \[3\] per example, got torch.float64 \[2\]"):
        edge.send(0)


def test_nothing_is_sent_within_a_process() -> None:
    edge = channel()
    with pytest.raises(JobError, match="0 and 1 are in one process"):
        edge.receive(0, 1, 1)


@pytest.mark.parametrize(
    "index", [(slice(None), slice(0, 2)), (slice(1, None), slice(None))], ids=["strided", "offset"]
)
def test_owned_copies_only_views(index: tuple[slice, slice]) -> None:
    whole = torch.zeros(4, 3, requires_grad=True) * 1
    assert owned(whole).data_ptr() == whole.data_ptr()
    assert not owned(whole).requires_grad
    part = owned(whole[index])
    assert part.is_contiguous()
    assert part.storage_offset() == 0
    assert part.data_ptr() % 64 == 0
