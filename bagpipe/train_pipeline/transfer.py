"""Moves a user's batch to a device, whatever container it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["to_device"]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device.

    Anything with a method ``to`` moves itself, as tensors, KeyedJaggedTensors and torchrec's `Batch` do. Mappings,
    tuples, lists and dataclasses are rebuilt; other values stay. On a CPU the batch itself is returned.
    """
    if device.type == "cpu":
        return batch
    return _moved(batch, device)


def _moved(value: Any, device: torch.device) -> Any:
    if callable(getattr(value, "to", None)):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return type(value)({key: _moved(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value
