"""Every configuration field is a documented key with a type; conversion is exact and refuses other types."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config.keys import CONVERTERS, Given, Key, attribute_texts, config_keys, convert
from bagpipe.config.ranges import NumberText
from bagpipe.errors import InputError


def key(kind: object) -> Key:
    return Key(section="data", name="limit", type=kind, range=None, default=None, help="")


def converted(kind: object, value: object) -> object:
    return convert(key(kind), Given(value=value, subject="--data.limit"))


@pytest.mark.parametrize("item", config_keys(), ids=lambda item: item.path)
def test_every_key_has_a_help_text_and_a_known_type(item):
    assert item.help.endswith(".")
    assert item.type in CONVERTERS
    assert converted(item.type, list(item.default) if isinstance(item.default, tuple) else item.default) == item.default


def test_attribute_texts_joins_lines_and_stops_at_the_next_section():
    docstring = """What it is.

    Attributes:
        first: one line.
        second: two
            lines: with a colon.

    Raises:
        third: not an attribute.
    """
    assert attribute_texts(docstring) == {"first": "one line.", "second": "two lines: with a colon."}


@given(st.integers())
def test_integers_from_files_and_flags(number):
    assert converted(int, number) == converted(int, str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_from_files_and_flags(number):
    assert converted(float, number) == converted(float, repr(number)) == number


@given(st.lists(st.integers(min_value=-(10**6), max_value=10**6)))
def test_lists_from_files_and_flags(numbers):
    text = ",".join(map(str, numbers))
    assert converted(tuple[int, ...], numbers) == tuple(numbers)
    assert converted(tuple[int, ...], text) == converted(tuple[int, ...], f"[{text}]") == tuple(numbers)


@pytest.mark.parametrize("given", ["a.b, c", ["a.b", "c"]])
def test_lists_of_strings_from_files_and_flags(given):
    assert converted(tuple[str, ...], given) == ("a.b", "c")
    assert converted(tuple[str, ...], "") == ()


@given(st.text())
def test_strings_are_taken_as_they_are(text):
    assert converted(str, text) == text


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (int, ["x", "", "1.5", 1.5, True, [1]], "an integer"),
        (float, ["x", "", math.nan, "inf", False, [1.0], 10**400], "a finite number"),
        (bool, ["yes", "1", 1, 0, ""], "true or false"),
        (str, [True, 1.5, ["a"]], "a string"),
        (NumberText, [True, ["a"], [[1]]], "a number, or numbers such as 1,0.5"),
        (tuple[str, ...], [1, [1], True], "a list of strings such as a,b"),
        (tuple[int, ...], ["a,b", "1,,2", [1.5], 64, ["x"]], "a list of integers such as 64,32"),
    ],
)
def test_values_of_another_type_are_refused_with_both_sides(kind, values, words):
    for value in values:
        with pytest.raises(InputError) as caught:
            converted(kind, value)
        assert str(caught.value) == f"--data.limit must be {words}, got {value!r}"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0.5, "0.5"),
        (1, "1"),
        ([1, 0.25], "1,0.25"),
        ("auto", "auto"),
        (0.3333333333333333, "0.3333333333333333"),
        (1e-5, "0.00001"),
    ],
)
def test_numbers_as_text_may_be_written_as_numbers(given, text):
    assert converted(NumberText, given) == text


def test_a_step_number_may_be_written_without_quotes():
    assert converted(str, 1000) == "1000"
