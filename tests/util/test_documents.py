"""JSON and TOML from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from bagpipe.errors import InputError
from bagpipe.util.documents import file_text, parse_json, parse_toml, read_value, toml_tables, versioned_toml


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["sum", "mean"]
    label: str | tuple[str, ...]
    inner: tuple[Inner, ...] = ()
    share: float = 0.5
    facts: Mapping[str, int] | None = None


GOOD: dict[str, Any] = {"kind": "sum", "label": ["a", "b"], "inner": [{"name": "x", "rows": 2}, {"name": "y"}]}


def test_a_record_is_read_back() -> None:
    assert read_value(Outer, GOOD, "file", has_defaults=True) == Outer(
        kind="sum", label=("a", "b"), inner=(Inner(name="x", rows=2), Inner(name="y"))
    )
    assert read_value(Outer, {**GOOD, "label": "a", "facts": {"n": 1}}, "file", has_defaults=True).facts == {"n": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "max"}, "file: kind: expected one of sum, mean, got 'max'"),
        ({"kind": []}, "file: kind: expected one of sum, mean, got"),
        ({"label": 5}, "file: label: expected a list, got '5'"),
        ({"label": [5]}, r"file: label\[0\]: expected a text, got '5'"),
        ({"inner": {}}, "file: inner: expected a list"),
        ({"inner": [5]}, r"file: inner\[0\]: expected an object, got '5'"),
        ({"inner": [{}]}, r"file: missing field inner\[0\]\.name"),
        ({"inner": [{"name": "x", "rows": -1}]}, r"file: inner\[0\]\.rows: expected 0 or more, got -1"),
        ({"inner": [{"name": "x", "rows": True}]}, r"file: inner\[0\]\.rows: expected an integer, got 'True'"),
        ({"share": "half"}, "file: share: expected a number, got 'half'"),
        ({"facts": {"n": "1"}}, "file: facts: expected an object"),
        ({"more": 1}, "file: unknown field more"),
    ],
)
def test_another_record_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_value(Outer, {**GOOD, **change}, "file", has_defaults=True)


def test_what_is_no_object_is_refused() -> None:
    for value in (5, [1], None, "x"):
        with pytest.raises(InputError, match=r"^file: expected an object, got "):
            read_value(Outer, value, "file")


def test_without_defaults_every_field_is_needed() -> None:
    with pytest.raises(InputError, match="file: missing field facts"):
        read_value(Outer, GOOD, "file")


def test_a_file_that_a_person_writes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"x = '\xc2\xb5'\r\n", b"\xef\xbb\xbfx = '\xc2\xb5'\n"):
        file.write_bytes(content)
        assert file_text(file, subject="--flag") == "x = 'µ'\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"ok \xe9", "got byte 0xe9"), ("x".encode("utf-16"), "got UTF-16"), (b"\xfe\xff\0x", "got UTF-16")],
)
def test_a_file_that_is_not_utf_8(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=f"^--flag: cannot read .*/file: expected UTF-8 text, {reason}$"):
        file_text(tmp_path / "file", subject="--flag")


@pytest.mark.parametrize(
    ("path", "reason"), [("/no/such", "No such file or directory"), ("/", "Is a directory"), ("a\0b", "embedded null")]
)
def test_a_file_that_cannot_be_read(path: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"^--flag: cannot read .*: {reason}"):
        file_text(path, subject="--flag")


def test_a_toml_file_of_the_version() -> None:
    assert versioned_toml("version = 2\nx = 1", version=2, source="file") == {"x": 1}
    for text in ("x = 1", "version = 1"):
        with pytest.raises(InputError, match="file: version: expected 2"):
            versioned_toml(text, version=2, source="file")
    with pytest.raises(InputError, match="file: not valid TOML: "):
        toml_tables("x = ", source="file")


def test_text_that_is_nested_too_deeply() -> None:
    with pytest.raises(ValueError, match="fewer levels of brackets"):
        parse_json("[" * 100_000)
    with pytest.raises(ValueError, match="fewer levels of brackets"):
        parse_toml("a = " + "[" * 100_000)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json(b"")
