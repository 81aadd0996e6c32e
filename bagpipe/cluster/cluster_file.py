"""`ClusterModel` as TOML: files of users and of `bagpipe calibrate`, and the presets of this folder.

cluster.toml | name of a preset ──load_cluster──> ClusterModel ──to_toml──> text that `from_toml` reads
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from bagpipe.cluster.model import ClusterModel
from bagpipe.errors import InputError
from bagpipe.util.documents import file_text, read_value, versioned_toml

__all__ = ["PRESETS", "from_toml", "load_cluster", "to_toml"]

_VERSION = 1
#: Keys of TOML that need no quotes.
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FOLDER = Path(__file__).parent / "presets"

#: Names of the presets.
PRESETS = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_cluster(name: str) -> ClusterModel:
    """The cluster of a file or a preset.

    Args:
        name: a path that ends in .toml, or one of `PRESETS`.

    Raises:
        InputError: there is no such file or preset, or it holds no cluster; one line.
    """
    if name in PRESETS:
        path = _FOLDER / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise InputError(f"cluster: expected a .toml file or one of {', '.join(PRESETS)}, got {name!r}")
    return from_toml(file_text(path, subject="cluster"), source=name)


def from_toml(text: str, *, source: str) -> ClusterModel:
    """The cluster that a text holds.

    Args:
        text: of the file.
        source: its name, for errors.

    Raises:
        InputError: one line: what was expected and what came.
    """
    document = versioned_toml(text, version=_VERSION, source=source)
    cluster: ClusterModel = read_value(ClusterModel, document, source, has_defaults=True, takes_integers=True)
    return cluster


def to_toml(cluster: ClusterModel) -> str:
    """The text of a cluster; `from_toml` is its inverse."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: ClusterModel) -> Iterator[str]:
    yield f"version = {_VERSION}"
    yield f"name = {_inline(cluster.name)}"
    if cluster.shared_cores:
        yield f"shared_cores = {cluster.shared_cores!r}"
    for kind in ("devices", "links"):
        for name, record in getattr(cluster, kind).items():
            yield from ("", f"[{kind}.{_key(name)}]")
            yield from _values(record)
    for hosts in cluster.trainers:
        yield from ("", "[[trainers]]")
        yield from _values(hosts)
    for name in ("stores", "cachers", "object_storage"):
        record = getattr(cluster, name)
        if record is not None:
            yield from ("", f"[{name}]")
            yield from _values(record)


def _values(record: Any) -> Iterator[str]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, tuple):
            yield f"{field.name} = ["
            yield from (f"    {_inline(item)}," for item in value)
            yield "]"
        else:
            yield f"{field.name} = {_inline(value)}"


def _inline(value: Any) -> str:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)
