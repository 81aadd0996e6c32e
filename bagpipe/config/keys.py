"""The keys of the configuration, read from the dataclasses of `bagpipe.config.sections`, and conversion of values.

    fields, type annotations, defaults, ``Attributes:`` docstrings ──> Key records ──> flags, --help, known TOML keys
    a value as written in a file or a flag (Given) ──CONVERTERS[type]──> the field's value, or one InputError

A new key is a field with its docstring line; a new type is an entry of `CONVERTERS`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from bagpipe.config.ranges import IntOrAuto, NumberText, Range, one_of
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.util.redaction import redact

__all__ = ["Given", "Key", "config_keys", "convert", "section_type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key.

    Attributes:
        section, name: the key is written ``section.name``.
        type: Python type of its values, a key of `CONVERTERS`.
        range: values accepted; None: all of the type.
        default: default value.
        help: one line.
    """

    section: str
    name: str
    type: Any
    range: Range | None
    default: object
    help: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def values(self) -> str:
        """The accepted values in words: the range, else the type."""
        return self.range.words if self.range is not None else CONVERTERS[self.type][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as the user wrote it, and its location: ``file.toml:12: data.limit`` or ``--data.limit``."""

    value: object = dataclasses.field(repr=False)  # it can be a URL with a password
    subject: str


@cache
def config_keys() -> tuple[Key, ...]:
    """Every configuration key in the order of `bagpipe.config.sections`."""
    keys: list[Key] = []
    for section in dataclasses.fields(Config):
        kind = section_type(section.name)
        hints = typing.get_type_hints(kind, include_extras=True)
        texts = attribute_texts(kind.__doc__ or "")
        for field in dataclasses.fields(kind):
            value_type, value_range = _type_and_range(hints[field.name])
            keys.append(
                Key(
                    section=section.name,
                    name=field.name,
                    type=value_type,
                    range=value_range,
                    default=field.default,
                    help=texts.get(field.name, ""),
                )
            )
    return tuple(keys)


def _type_and_range(hint: Any) -> tuple[Any, Range | None]:
    """Type and range of an annotation: a type, ``Annotated[type, Range]``, or ``Literal`` strings."""
    choices = _choices(hint)
    if choices:
        return str, one_of(*choices)
    if typing.get_origin(hint) is typing.Annotated:
        value_type, value_range = typing.get_args(hint)
        return value_type, value_range
    return hint, None


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) is typing.Union:
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    return ()


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


@cache
def section_type(section: str) -> type[Any]:
    """The dataclass of a section of `Config`."""
    kind: type[Any] = typing.get_type_hints(Config)[section]
    return kind


def convert(key: Key, given: Given) -> object:
    """Convert a value to the key's type. Raises InputError with its location, the expected type and the value."""
    words, converter = CONVERTERS[key.type]
    value = converter(given.value)
    if value is None:
        raise InputError(f"{given.subject} must be {words}, got {redact(repr(given.value))}")
    return value


def _to_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        return int(value)  # 100_000 is accepted in files and flags alike
    except ValueError:
        return None


def _to_int_or_auto(value: object) -> int | str | None:
    return "auto" if value == "auto" else _to_int(value)


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


def _to_number_text(value: object) -> str | None:
    if isinstance(value, float | list):
        numbers = _to_floats([value] if isinstance(value, float) else value)
        if numbers is None:
            return None
        return ",".join(f"{Decimal(repr(number)):f}".removesuffix(".0") for number in numbers)
    return _to_str(value)


def _to_ints(value: object) -> tuple[int, ...] | None:
    if isinstance(value, str):
        inner = value.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
        value = inner.split(",") if inner else []
    if not isinstance(value, list):
        return None
    numbers = [number for item in value if (number := _to_int(item)) is not None]
    return tuple(numbers) if len(numbers) == len(value) else None


def _to_floats(value: object) -> tuple[float, ...] | None:
    items = _to_strings(value) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        return None
    numbers = [number for item in items if (number := _to_float(item)) is not None]
    return tuple(numbers) if len(numbers) == len(items) else None


def _to_strings(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        inner = value.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
        value = [item.strip().strip("\"'") for item in inner.split(",")] if inner else []
    return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


#: By type of a configuration field: its name in messages, and the conversion of a str or TOML value (None: impossible).
CONVERTERS: Mapping[Any, tuple[str, Callable[[object], object | None]]] = {
    int: ("an integer", _to_int),
    IntOrAuto: ("an integer or auto", _to_int_or_auto),
    float: ("a finite number", _to_float),
    bool: ("true or false", _to_bool),
    str: ("a string", _to_str),
    NumberText: ("a number, or numbers such as 1,0.5", _to_number_text),
    tuple[str, ...]: ("a list of strings such as a,b", _to_strings),
    tuple[int, ...]: ("a list of integers such as 64,32", _to_ints),
    tuple[float, ...]: ("a list of numbers such as 1,0.5", _to_floats),
}
