"""Manifests and parts as JSON that carries its own checksum. What does not read back exactly is refused.

    record ──fields──> canonical JSON (sorted keys) ──XXH3-128──> + "checksum" ──indented──> file
    file ──parse, checksum──> BrokenCheckpoint, or ──format version, fields, types──> InputError, or the record

The checksum is compared first: a flipped bit makes a file broken, never "of a newer format".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import xxhash

from bagpipe.checkpoint.manifest import FORMAT_VERSION, BrokenCheckpoint, FileEntry, Manifest, Part
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import check_token

__all__ = ["decode_manifest", "decode_part", "encode"]

_T = TypeVar("_T")

_CHECKSUM = "checksum"
_HEX_128 = re.compile(r"[0-9a-f]{32}")

#: No separators, no hidden files: a name cannot lead out of its folder.
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.(npy|safetensors)")


def encode(record: Manifest | Part) -> bytes:
    """A manifest or part as the bytes of its file. ValueError if one of its values is no JSON."""
    value = json.loads(_canonical(dataclasses.asdict(record)))
    value[_CHECKSUM] = _checksum(value)
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def decode_manifest(content: bytes, place: str) -> Manifest:
    """The manifest in a file's bytes.

    Args:
        content: of the file.
        place: the file, for messages.

    Raises:
        BrokenCheckpoint: the bytes are not those that were written, or those of another file.
        InputError: they are, but by a newer version, or by something else: one line naming the field.
    """
    value = _parse(content, place)
    if "format_version" not in value:
        raise BrokenCheckpoint(f"{place}: it is no manifest: it has no format_version")
    version = value["format_version"]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InputError(
            f"{place}: the checkpoint has format version {version}, this bagpipe reads versions up to {FORMAT_VERSION}"
        )
    manifest: Manifest = _read(Manifest, value, place, "")
    if version != FORMAT_VERSION:
        raise InputError(f"{place}: format_version: expected {FORMAT_VERSION}, got {version!r}")
    _check_manifest(manifest, place)
    return manifest


def decode_part(content: bytes, place: str) -> Part:
    """The part in a file's bytes; see `decode_manifest`."""
    part: Part = _read(Part, _parse(content, place), place, "")
    _check_files([entry for entry in (part.dense, part.dirty, *(rows.file for rows in part.rows)) if entry], place)
    return part


def _parse(content: bytes, place: str) -> dict[str, Any]:
    """The JSON object, its checksum compared and removed."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{place}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{place}: expected a JSON object")
    written = value.pop(_CHECKSUM, None)
    if written != _checksum(value):
        raise BrokenCheckpoint(f"{place}: the content does not fit its checksum")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: object) -> NoReturn:
    raise ValueError(f"expected a JSON value, got {value!r}")


def _checksum(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_canonical(value).encode()).hexdigest()


@functools.cache
def _field_types(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _read(wanted: Any, value: Any, place: str, name: str) -> Any:
    """A JSON value as the type wanted, exactly: ``1`` is no float, ``true`` no integer, nothing is left out."""
    origin = typing.get_origin(wanted)
    if dataclasses.is_dataclass(wanted):
        return _read_record(wanted, value, place, name)
    if origin is tuple and isinstance(value, list):
        item = typing.get_args(wanted)[0]
        return tuple(_read(item, each, place, f"{name}[{number}]") for number, each in enumerate(value))
    if origin is types.UnionType:
        inner = next(option for option in typing.get_args(wanted) if option is not type(None))
        return None if value is None else _read(inner, value, place, name)
    if _is_mapping_of(wanted, value) or (isinstance(wanted, type) and type(value) is wanted):
        if isinstance(value, int) and value < 0:
            raise InputError(f"{place}: {name}: expected 0 or more, got {value}")
        return value
    raise InputError(f"{place}: {name}: expected {_title(wanted)}, got {str(value)[:80]!r}")


def _read_record(wanted: Any, value: Any, place: str, name: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{place}: {name}: expected an object, got {str(value)[:80]!r}")
    hints = _field_types(wanted)
    prefix = f"{name}." if name else ""
    for difference, what in ((value.keys() - hints.keys(), "unknown"), (hints.keys() - value.keys(), "missing")):
        if difference:
            raise InputError(f"{place}: {what} field {prefix}{min(difference)}")
    return wanted(**{field: _read(hint, value[field], place, prefix + field) for field, hint in hints.items()})


def _is_mapping_of(wanted: Any, value: Any) -> bool:
    if typing.get_origin(wanted) is not Mapping or not isinstance(value, dict):
        return False
    item = typing.get_args(wanted)[1]
    return item is Any or all(type(each) is item for each in value.values())


def _title(wanted: Any) -> str:
    return {"int": "an integer", "str": "a text", "bool": "true or false"}.get(
        getattr(wanted, "__name__", ""), "an object" if typing.get_origin(wanted) is Mapping else "a list"
    )


def _check_manifest(manifest: Manifest, place: str) -> None:
    if not _HEX_128.fullmatch(manifest.lineage):
        raise InputError(f"{place}: lineage: expected 32 hexadecimal digits, got {manifest.lineage!r}")
    try:
        check_token(manifest.token)
    except ValueError as error:
        raise InputError(f"{place}: token: {error}") from None
    ranks = [part.rank for part in manifest.parts]
    if ranks != list(range(manifest.world_size)):
        raise InputError(f"{place}: parts: expected ranks 0 to {manifest.world_size - 1}, got {ranks}")
    steps = [file.step for file in manifest.row_files]
    if steps != sorted(steps) or (steps and steps[-1] > manifest.step):
        raise InputError(f"{place}: row files: expected ascending steps up to {manifest.step}, got {steps}")
    for file in manifest.row_files:
        if not file.row_bytes or not file.num_rows:
            raise InputError(f"{place}: row file {file.file.name!r} has no rows")
    _check_files(list(manifest.files), place)


def _check_files(entries: list[FileEntry], place: str) -> None:
    for entry in entries:
        if not _FILE_NAME.fullmatch(entry.name):
            raise InputError(f"{place}: file name {entry.name!r} is not one of a checkpoint")
        if not _HEX_128.fullmatch(entry.xxh3_128):
            raise InputError(f"{place}: file {entry.name}: expected 32 hexadecimal digits, got {entry.xxh3_128!r}")
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise InputError(f"{place}: a file is named twice")
