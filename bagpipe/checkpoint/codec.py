"""JSON codec of manifests and parts, with an embedded checksum. Decoding is strict.

    record ──fields──> canonical JSON (sorted keys) ──XXH3-128──> + "checksum" ──indented──> file
    file ──parse, checksum──> BrokenCheckpoint, or ──format version, fields, types──> InputError, or the record

The checksum is compared first: a flipped bit makes a file broken, never a file of a newer format.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import xxhash

from bagpipe.checkpoint.manifest import (
    FORMAT_VERSION,
    VERSION_WITHOUT_DELETIONS,
    VERSION_WITHOUT_KNOWN_ROWS,
    BrokenCheckpoint,
    FileEntry,
    Manifest,
    Part,
)
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import check_token
from bagpipe.store.keys import MAX_BUCKETS
from bagpipe.types.schema import RowSchema
from bagpipe.util.documents import parse_json, read_value

__all__ = ["decode_manifest", "decode_part", "encode"]

_CHECKSUM = "checksum"
_HEX_128 = re.compile(r"[0-9a-f]{32}")

#: Format version -> the fields that it added, with their values in manifests of earlier versions.
_ADDED_FIELDS: Mapping[int, Mapping[str, Any]] = {
    2: {"arithmetic": []},
    3: {"row_sums": []},
    4: {"changes": []},
    5: {"origin": {}},
}
#: The same of parts in a manifest.
_ADDED_PART_FIELDS: Mapping[int, Mapping[str, Any]] = {3: {"row_sums": []}}

#: No separators and no leading dot: a name cannot leave its folder.
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\.(npy|safetensors)")


def encode(record: Manifest | Part) -> bytes:
    """File content of a manifest or part. ValueError if a value is not JSON."""
    value = json.loads(_canonical(dataclasses.asdict(record)))
    if isinstance(record, Manifest) and record.known_rows is None:
        has_deletions = any(file.is_deletions for file in record.row_files)
        value["format_version"] = VERSION_WITHOUT_KNOWN_ROWS if has_deletions else VERSION_WITHOUT_DELETIONS
    value[_CHECKSUM] = _checksum(value)
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Decode a manifest. One of an earlier version becomes one of this version.

    Args:
        content: the file's bytes.
        path: the file, for messages.

    Raises:
        BrokenCheckpoint: the content was changed, or is not a manifest.
        InputError: the content is intact, but of a newer version or with wrong fields; one line naming the field.
    """
    value = _parse(content, path)
    if "format_version" not in value:
        raise BrokenCheckpoint(f"{path}: expected a manifest, got JSON without format_version")
    version = value["format_version"]
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InputError(
            f"{path}: the checkpoint has format version {version}, this bagpipe reads versions up to {FORMAT_VERSION}"
        )
    value = _upgraded(value, version)
    manifest: Manifest = read_value(Manifest, value, path)
    if not version:
        raise InputError(f"{path}: format_version: expected 1 to {FORMAT_VERSION}, got {version!r}")
    _check_manifest(manifest, path)
    return dataclasses.replace(manifest, format_version=FORMAT_VERSION)


def _upgraded(value: dict[str, Any], version: object) -> dict[str, Any]:
    """A manifest's JSON with the fields that versions after its own have added."""
    if type(version) is not int:
        return value
    for added, fields in _ADDED_FIELDS.items():
        if version < added:
            value = {**fields, **value}
    parts = value.get("parts")
    for added, fields in _ADDED_PART_FIELDS.items():
        if version < added and isinstance(parts, list):
            value["parts"] = parts = [{**fields, **part} if isinstance(part, dict) else part for part in parts]
    return value


def decode_part(content: bytes, path: str) -> Part:
    """Decode a part; see `decode_manifest`."""
    part: Part = read_value(Part, _parse(content, path), path)
    _check_files([entry for entry in (part.dense, part.dirty, *(rows.file for rows in part.rows)) if entry], path)
    return part


def _parse(content: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object; verify and remove its checksum."""
    try:
        value = parse_json(content.decode("utf-8"), _reject_duplicates)
    except ValueError as error:
        raise BrokenCheckpoint(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{path}: expected a JSON object")
    written = value.pop(_CHECKSUM, None)
    if written != _checksum(value):
        raise BrokenCheckpoint(f"{path}: the content does not match its checksum")
    return value


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_reject_non_json)


def _reject_non_json(value: object) -> NoReturn:
    raise ValueError(f"expected a JSON value, got {value!r}")


def _checksum(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_canonical(value).encode()).hexdigest()


def _check_manifest(manifest: Manifest, path: str) -> None:
    if not _HEX_128.fullmatch(manifest.lineage):
        raise InputError(f"{path}: lineage: expected 32 hexadecimal digits, got {manifest.lineage!r}")
    try:
        check_token(manifest.token)
    except ValueError as error:
        raise InputError(f"{path}: token: {error}") from None
    RowSchema.from_json(manifest.row_schema, f"{path}: row schema")
    ranks = [part.rank for part in manifest.parts]
    if len(ranks) != manifest.world_size or ranks != list(range(len(ranks))):
        raise InputError(f"{path}: parts: expected ranks 0 to {manifest.world_size - 1}, got {ranks}")
    objects = {"origin.takings": manifest.origin.get("takings", {})}
    for part in manifest.parts:
        objects[f"parts[{part.rank}].progress.reader_state"] = part.progress.get("reader_state") or {}
    for name, value in objects.items():
        if not isinstance(value, dict):
            raise InputError(f"{path}: {name}: expected an object, got {str(value)[:80]!r}")
    if "known_rows" in manifest.origin:
        read_value(FileEntry, manifest.origin["known_rows"], f"{path}: origin.known_rows")
    steps = [file.step for file in manifest.row_files]
    if steps != sorted(steps) or (steps and steps[-1] > manifest.step):
        raise InputError(f"{path}: row files: expected ascending steps up to {manifest.step}, got {steps}")
    for file in manifest.row_files:
        if not file.num_rows:
            raise InputError(f"{path}: row file {file.file.name!r} has no rows")
        if file.is_deletions and file.full:
            raise InputError(f"{path}: row file {file.file.name!r} has deletions, which are never all rows")
    num_buckets = len(manifest.row_sums)
    if num_buckets > MAX_BUCKETS or num_buckets & (num_buckets - 1):
        raise InputError(f"{path}: row_sums: expected one for each bucket, a power of two, got {num_buckets}")
    _check_files(list(manifest.files), path)


def _check_files(entries: list[FileEntry], path: str) -> None:
    for entry in entries:
        if not _FILE_NAME.fullmatch(entry.name):
            raise InputError(f"{path}: file name {entry.name!r} is not a checkpoint file name")
        if not _HEX_128.fullmatch(entry.xxh3_128):
            raise InputError(f"{path}: file {entry.name}: expected 32 hexadecimal digits, got {entry.xxh3_128!r}")
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise InputError(f"{path}: a file is listed twice")
