"""States as bytes: tensors, arrays and plain Python values in containers, without pickling.

    {"a": (1, tensor)} ──to_bytes──> a safetensors file: tensors, and the containers around them as JSON in its metadata
                       <──from_bytes──

Mappings come back as dictionaries, arrays as arrays. Values of other types are refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json

__all__ = ["from_bytes", "to_bytes"]

#: Key of a JSON object that stands for a value that JSON has not.
_KIND = "$"


def to_bytes(state: Any) -> bytes:
    """The bytes of a state.

    Raises:
        InputError: it holds a value of another type; names the type.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors)
    return save(tensors, {"tree": json.dumps(tree)})


def from_bytes(data: bytes) -> Any:
    """The state that `to_bytes` was given.

    Raises:
        ValueError: the bytes are not those of a state.
    """
    try:
        # The format's header: its length, 8 bytes little-endian, then JSON.
        end = 8 + int.from_bytes(data[:8], "little")
        tree = parse_json(parse_json(data[8:end])["__metadata__"]["tree"])
        return _decode(tree, load(data))
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"not the bytes of a state: {error!r}") from None


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray):
        return {**_encode(torch.from_numpy(value.copy()), tensors), _KIND: "array"}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()  # memory that two tensors share is written twice
        return {_KIND: "tensor", "value": name}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != _KIND for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        pairs = [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]
        return {_KIND: "dict", "value": pairs}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {_KIND: kind, "value": [_encode(item, tensors) for item in value]}
    raise InputError(
        "a state to be kept in checkpoints must hold tensors, arrays and plain Python values, got "
        f"{type(value).__name__}"
    )


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _KIND not in tree:
        return {key: _decode(item, tensors) for key, item in tree.items()}
    return _DECODERS[tree[_KIND]](tree["value"], tensors)


_DECODERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "bytes": lambda value, tensors: base64.b64decode(value),
    "tensor": lambda value, tensors: tensors[value],
    "array": lambda value, tensors: tensors[value].numpy(),
    "dict": lambda value, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in value},
    "tuple": lambda value, tensors: tuple(_decode(value, tensors)),
    "set": lambda value, tensors: set(_decode(value, tensors)),
}
