"""`print_text`, `print_error`: all text that programs print passes these, because parts of it come from outside.

Names of columns, files and metrics, and answers of servers, can hold characters that a terminal obeys.
"""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["print_error", "print_text", "printable"]


def printable(text: str) -> str:
    r"""Text with its control characters escaped, such as ``\x1b``; line ends stay. So are those that change the
    direction of what follows, and halves of surrogate pairs, which no stream can encode.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def print_text(text: str) -> None:
    """Print lines to stdout."""
    sys.stdout.write(f"{printable(text)}\n")


def print_error(text: str) -> None:
    """Print lines to stderr, if it is there: a program without one, such as a user's in the background, goes on."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"{printable(text)}\n")
