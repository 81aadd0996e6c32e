"""The keys of the configuration and their values' types, read off the dataclasses of `bagpipe.config.sections`.

    dataclass fields, defaults, ``Attributes:`` docstrings ──> Key records ──> flags, --help, known TOML keys
    a value as written in a file or a flag (Given) ──CONVERTERS[type]──> the field's value, or one InputError

Adding a key means adding a field with its docstring line; adding a type means adding a line to `CONVERTERS`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.config.sections import Config
from bagpipe.errors import InputError

__all__ = ["Given", "Key", "config_keys", "convert", "section_type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key: ``section.name``, its Python type, default and help text."""

    section: str
    name: str
    type: Any
    default: object
    help: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as the user wrote it, and what to call it: ``file.toml:12: data.limit`` or ``--data.limit``."""

    value: object
    subject: str


def config_keys() -> tuple[Key, ...]:
    """Every configuration key in the order of `bagpipe.config.sections`."""
    keys: list[Key] = []
    for section in dataclasses.fields(Config):
        kind = section_type(section.name)
        types = typing.get_type_hints(kind)
        texts = attribute_texts(kind.__doc__ or "")
        keys += [
            Key(
                section=section.name,
                name=field.name,
                type=types[field.name],
                default=field.default,
                help=texts.get(field.name, ""),
            )
            for field in dataclasses.fields(kind)
        ]
    return tuple(keys)


def attribute_texts(docstring: str) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring: attribute name -> its text on one line."""
    texts: dict[str, str] = {}
    name = ""
    indent: int | None = None
    for line in docstring.partition("Attributes:")[2].splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth < indent:
            break
        if depth == indent:
            name, _, text = line.strip().partition(":")
            texts[name] = text.strip()
        else:
            texts[name] += " " + line.strip()
    return texts


def section_type(section: str) -> type[Any]:
    """The dataclass of a section of `Config`."""
    kind: type[Any] = typing.get_type_hints(Config)[section]
    return kind


def convert(key: Key, given: Given) -> object:
    """`given` as a value of the key's type. Raises InputError naming it, the expected type and the value."""
    words, converter = CONVERTERS[key.type]
    value = converter(given.value)
    if value is None:
        raise InputError(f"{given.subject} must be {words}, got {given.value!r}")
    return value


def _to_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        return int(value)  # 100_000 is accepted in files and flags alike
    except ValueError:
        return None


def _to_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _to_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())


def _to_str(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # checkpoint.resume = 1000
    return value if isinstance(value, str) else None


def _to_ints(value: object) -> tuple[int, ...] | None:
    if isinstance(value, str):
        inner = value.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
        value = inner.split(",") if inner else []
    if not isinstance(value, list):
        return None
    numbers = [number for item in value if (number := _to_int(item)) is not None]
    return tuple(numbers) if len(numbers) == len(value) else None


#: Type of a configuration field -> what to call it in a message, and str or TOML value -> field value or None.
CONVERTERS: Mapping[Any, tuple[str, Callable[[object], object | None]]] = {
    int: ("an integer", _to_int),
    float: ("a finite number", _to_float),
    bool: ("true or false", _to_bool),
    str: ("a string", _to_str),
    tuple[int, ...]: ("a list of integers such as 64,32", _to_ints),
}
