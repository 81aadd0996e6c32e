"""Serialized `tf.train.Example` messages as Arrow tables, decoded by protobuf; TensorFlow is not needed.

    Example { Features { map<string, Feature> } }      Feature: a list of bytes, floats or 64-bit integers
    record ──protobuf──> lists by name ──types of the wanted columns──> Arrow columns, malformed records

Decoding is a Python loop over records and columns, so that parser processes and `convert` pay off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from data.arrow_columns import ArrowBlock

__all__ = ["decode_examples", "example_class"]

_LISTS: Mapping[pa.DataType, tuple[str, ...]] = {
    pa.int64(): ("int64_list",),
    pa.binary(): ("bytes_list",),
    pa.float64(): ("float_list", "int64_list"),
    pa.float32(): ("float_list", "int64_list"),
}
_WORDS: Mapping[pa.DataType, str] = {
    pa.int64(): "integers",
    pa.binary(): "strings",
    pa.float64(): "numbers",
    pa.float32(): "numbers",
}


@cache
def example_class() -> Any:
    """The message class, as TensorFlow's example.proto and feature.proto define it, in a descriptor pool of its own."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    lists = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in lists.items():
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)

    def refer(owner: Any, name: str, number: int, kind: str, **more: Any) -> None:
        more = {"label": field.LABEL_OPTIONAL, **more}
        owner.field.add(name=name, number=number, type=field.TYPE_MESSAGE, type_name=f".tensorflow.{kind}", **more)

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), start=1
    ):
        refer(feature, name, number, kind, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    refer(entry, "value", 2, "Feature")
    refer(features, "feature", 1, "Features.FeatureEntry", label=field.LABEL_REPEATED)
    refer(file.message_type.add(name="Example"), "features", 1, "Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def decode_examples(records: Iterable[bytes], columns: pa.Schema, *, stops: bool) -> ArrowBlock:
    """Decode a block of records.

    Args:
        records: serialized examples.
        columns: names and types of the wanted columns: int64, binary, float32, float64, or lists of these.
        stops: explain the first malformed record, and read only the records before it.
    """
    decode = example_class().FromString
    kinds = [(field.name, _element(field.type), pa.types.is_list(field.type)) for field in columns]
    values: list[list[Any]] = [[] for _ in kinds]
    lengths: list[list[int]] = [[] for _ in kinds]
    malformed: list[int] = []
    problem = ""
    count = 0
    for count, record in enumerate(records, start=1):
        try:
            found = _lists(decode(record).features.feature, kinds)
        except message.DecodeError:
            found = "expected a serialized tf.train.Example, got other bytes"
        if isinstance(found, str):
            malformed.append(count - 1)
            if stops and not problem:
                problem = found
        elif not problem:
            for number, items in enumerate(found):
                values[number].extend(items)
                lengths[number].append(len(items))
    arrays = [
        _array(kind, is_list, items, sizes)
        for (_, kind, is_list), items, sizes in zip(kinds, values, lengths, strict=True)
    ]
    return ArrowBlock(
        table=pa.table(arrays, schema=columns),
        num_raw_rows=count,
        malformed=np.array(malformed[:1] if stops else malformed, np.int64),
        problem=problem,
    )


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind


def _lists(features: Any, kinds: list[tuple[str, pa.DataType, bool]]) -> list[Any] | str:
    """The values of each column, or what is wrong."""
    found = []
    for name, kind, is_list in kinds:
        feature = features[name]  # an absent one is an empty one
        items: Any = ()
        for allowed in _LISTS[kind]:
            items = getattr(feature, allowed).value
            if items:
                break
        else:
            which = feature.WhichOneof("kind")
            if which is not None and getattr(feature, which).value:
                return f"expected {_WORDS[kind]} in {name!r}, got {which}"
        if not is_list and len(items) > 1:
            return f"expected one of the {_WORDS[kind]} in {name!r}, got {len(items)}"
        found.append(items)
    return found


def _array(kind: pa.DataType, is_list: bool, values: list[Any], lengths: list[int]) -> pa.Array:
    flat = pa.array(values, kind)
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    if is_list:
        return pa.ListArray.from_arrays(pa.array(bounds), flat)
    places = np.where(np.diff(bounds) > 0, bounds[:-1], -1)
    return flat.take(pa.array(places, mask=places < 0))
