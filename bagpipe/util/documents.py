"""JSON and TOML from outside: parsed without tracebacks, and read into records with their types checked.

file that a person writes ──file_text──> text                                           InputError
text ──parse_json | parse_toml──> plain values ──read_value──> a frozen dataclass        ValueError, InputError
text of a named file ──toml_tables | versioned_toml──> plain values                     InputError
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError

__all__ = ["file_text", "parse_json", "parse_toml", "read_value", "toml_tables", "versioned_toml"]


def file_text(path: str | Path, *, subject: str) -> str:
    """The text of a file that a person writes, in UTF-8, without the byte order mark with which some editors begin it.

    Args:
        path: of the file.
        subject: the flag or key that names it, for errors.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = f"expected UTF-8 text, got {'UTF-16' if is_utf16 else f'byte 0x{error.object[error.start]:02x}'}"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # a path with a zero byte
        reason = str(error)
    raise InputError(f"{subject}: cannot read {path}: {reason}")


def parse_json(text: str | bytes | bytearray, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        pairs: as json's `object_pairs_hook`.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("expected JSON with fewer levels of brackets") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: it is not TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("expected TOML with fewer levels of brackets") from None


def toml_tables(text: str, *, source: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        text: of the file.
        source: its name, for errors.

    Raises:
        InputError: it is not TOML, or nested too deeply.
    """
    try:
        return parse_toml(text)
    except ValueError as error:
        raise InputError(f"{source}: not valid TOML: {error}") from None


def versioned_toml(text: str, *, version: int, source: str) -> dict[str, Any]:
    """The tables of a TOML file, without its key ``version``; the arguments of `toml_tables`, and the version.

    Raises:
        InputError: as `toml_tables`, or it is of another version, or of none.
    """
    document = toml_tables(text, source=source)
    if document.pop("version", None) != version:
        raise InputError(f"{source}: version: expected {version}")
    return document


@functools.cache
def _field_types(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def read_value(
    expected: Any, value: Any, where: str, name: str = "", *, has_defaults: bool = False, takes_integers: bool = False
) -> Any:
    """A value of parsed JSON as the expected type. Strict: ``1`` is not a float, ``true`` not an integer.

    Args:
        expected: a dataclass, a tuple of one type, a mapping, a union of those with None, a Literal or a plain type.
        value: the JSON.
        where: the document, for messages.
        name: of the value in it.
        has_defaults: fields with defaults may be missing.
        takes_integers: an integer is a float too, as people write them.

    Raises:
        InputError: another type, an unknown or missing field, a negative integer; one line naming the field.
    """
    read = functools.partial(read_value, where=where, has_defaults=has_defaults, takes_integers=takes_integers)
    origin, options = typing.get_origin(expected), typing.get_args(expected)
    if dataclasses.is_dataclass(expected):
        return _read_record(expected, value, where, name, read, has_defaults)
    if origin is Mapping and isinstance(value, dict) and (takes_integers or dataclasses.is_dataclass(options[1])):
        return {key: read(options[1], each, name=f"{name}.{key}") for key, each in value.items()}
    if expected is float and takes_integers and type(value) is int:
        return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(read(options[0], each, name=f"{name}[{number}]") for number, each in enumerate(value))
    if origin is types.UnionType:
        if value is None and type(None) in options:
            return None
        kinds = [option for option in options if option is not type(None)]
        return read(next((kind for kind in kinds if kind is type(value)), kinds[-1]), value, name=name)
    if origin is typing.Literal:
        if value in options:
            return value
        raise InputError(f"{where}: {name}: expected one of {', '.join(map(str, options))}, got {str(value)[:80]!r}")
    if _is_mapping_of(expected, value) or (isinstance(expected, type) and type(value) is expected):
        if isinstance(value, int) and value < 0:
            raise InputError(f"{where}: {name}: expected 0 or more, got {value}")
        return value
    raise InputError(f"{where}: {name}: expected {_type_name(expected)}, got {str(value)[:80]!r}")


def _read_record(expected: Any, value: Any, where: str, name: str, read: Callable[..., Any], has_defaults: bool) -> Any:
    if not isinstance(value, Mapping):
        place = f"{where}: {name}" if name else where
        raise InputError(f"{place}: expected an object, got {str(value)[:80]!r}")
    hints = _field_types(expected)
    needed = {
        field.name
        for field in dataclasses.fields(expected)
        if not has_defaults or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
    }
    prefix = f"{name}." if name else ""
    for difference, what in ((value.keys() - hints.keys(), "unknown"), (needed - value.keys(), "missing")):
        if difference:
            raise InputError(f"{where}: {what} field {prefix}{min(map(str, difference))}")
    values = {field: read(hints[field], item, name=prefix + field) for field, item in value.items()}
    try:
        return expected(**values)
    except InputError as error:  # of the record's own checks
        raise InputError(f"{where}: {error}") from None


def _is_mapping_of(expected: Any, value: Any) -> bool:
    if typing.get_origin(expected) is not Mapping or not isinstance(value, dict):
        return False
    item = typing.get_args(expected)[1]
    return item is Any or all(type(each) is item for each in value.values())


def _type_name(expected: Any) -> str:
    return {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"}.get(
        getattr(expected, "__name__", ""), "an object" if typing.get_origin(expected) is Mapping else "a list"
    )
