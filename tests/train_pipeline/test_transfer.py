"""Batches move to a device as the containers they are. The meta device stands for one."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch

from bagpipe.train_pipeline.transfer import to_device

Pair = namedtuple("Pair", "first second")
META = torch.device("meta")


@dataclass
class Data:
    x: torch.Tensor
    rest: tuple[torch.Tensor, str]


def test_a_cpu_gets_the_batch_itself() -> None:
    batch = {"x": torch.zeros(2)}
    assert to_device(batch, torch.device("cpu")) is batch


def test_containers_are_rebuilt_around_moved_tensors() -> None:
    moved = to_device({"a": [torch.zeros(2), 3], "b": Data(x=torch.ones(1), rest=(torch.ones(1), "kept"))}, META)
    assert moved["a"][0].device == moved["b"].x.device == moved["b"].rest[0].device == META
    assert (moved["a"][1], moved["b"].rest[1]) == (3, "kept")
    pair = to_device(Pair(torch.zeros(1), None), META)
    assert isinstance(pair, Pair)
    assert pair.first.device == META
