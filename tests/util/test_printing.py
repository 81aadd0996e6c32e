"""What is printed cannot command a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.util.printing import print_error, print_text, printable
from bagpipe.util.program import run_program


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 13 µs × 2 → ok", "plain, 13 µs × 2 → ok"),
        ("two\nlines", "two\nlines"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\tc\x00", r"a\rb\tc\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("column\u202egnp.exe", r"column\u202egnp.exe"),
        ("file \udcff", r"file \udcff"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert all(each.isprintable() or each == "\n" for each in shown)
    shown.encode()
    assert printable(shown) == shown


def test_both_streams(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("out\x1b")
    print_error("error\x1b")
    assert capsys.readouterr() == ("out\\x1b\n", "error\\x1b\n")


def test_the_error_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise InputError("the column 'a\x1b[31m' is unknown")

    assert run_program(main, []) == 2
    assert capsys.readouterr().err == "error: the column 'a\\x1b[31m' is unknown\n"
