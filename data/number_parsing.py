"""Parses numbers in text, many fields at once, without a loop over fields or characters.

    text ──translate──> nibbles        each byte becomes its digit value, or a flag: '-' or "not a digit"
    nibbles ──8-byte loads ending at each field's end──> words of 8 digits ──3 multiply-adds──> numbers

A field of up to 16 digits is two words. Fields that are not numbers are flagged.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Positions", "Words", "byte_words", "digit_words", "parse_hex", "parse_integers", "quote"]

Words = NDArray[np.uint64]
Positions = NDArray[np.int64]

_MINUS = 0x20
_NOT_A_DIGIT = 0x40
#: Loads begin up to 16 bytes before a field's end, and read 8 bytes from the start of an empty field at the text's end.
_PADDING = b"\0" * 16


def _nibble_table() -> bytes:
    table = bytearray([_NOT_A_DIGIT]) * 256
    for value, digits in enumerate(
        ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "aA", "bB", "cC", "dD", "eE", "fF")
    ):
        for digit in digits:
            table[ord(digit)] = value
    table[ord("-")] = _MINUS
    return bytes(table)


_NIBBLES = _nibble_table()

_U8 = np.uint64(8)
_U16 = np.uint64(16)
_U32 = np.uint64(32)
_LANES_16 = np.uint64(0x00FF00FF00FF00FF)
_LANES_32 = np.uint64(0x0000FFFF0000FFFF)
_LANES_64 = np.uint64(0x00000000FFFFFFFF)
_FLAGS = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIXES = np.uint64(0x0606060606060606)
_TENS = np.uint64(0x1010101010101010)
#: Byte masks keeping the last k of 8 bytes (the first byte of a field is the lowest byte of the little-endian word).
_KEEP_LAST = np.array([(2**64 - 1) ^ ((1 << (8 * (8 - k))) - 1) for k in range(9)], dtype=np.uint64)


def digit_words(text: bytes) -> Words:
    """Input of `parse_hex` and `parse_integers`: the 8 bytes at every position of the padded text, as digit values."""
    return _words(text.translate(_NIBBLES))


def byte_words(text: bytes, ends: Positions, widths: Positions) -> Words:
    """The last ``min(width, 8)`` bytes of fields, first byte lowest, the bytes before them 0."""
    return _load(_words(text), ends, widths)


def _words(text: bytes) -> Words:
    padded = b"".join((_PADDING, text, _PADDING))
    # An unaligned view, one word per byte position; numpy copies elements of such views safely.
    return np.ndarray((len(padded) - 7,), "<u8", padded, 0, (1,))


def _load(words: Words, ends: Positions, widths: Positions) -> Words:
    """The last ``min(width, 8)`` digits before each end, one per byte, first digit lowest; other bytes 0."""
    loaded = words[ends + (len(_PADDING) - 8)]
    loaded &= _KEEP_LAST.take(widths, mode="clip")
    return loaded


def _combine(digits: Words, base: int) -> Words:
    """Eight digits per word, first digit in the lowest byte, as one number: pairs, then fours, then eight. In place."""
    for bits, lanes, scale in ((_U8, _LANES_16, base), (_U16, _LANES_32, base**2), (_U32, _LANES_64, base**4)):
        high = digits >> bits
        digits *= np.uint64(scale)
        digits += high
        digits &= lanes
    return digits


def parse_hex(words: Words, ends: Positions, widths: Positions) -> tuple[Positions, NDArray[np.bool_]]:
    """Parse hexadecimal fields as int64 (two's complement).

    Args:
        words: from `digit_words`.
        ends, widths: int64 of one shape: end of each field in the text (past its last digit), and its bytes.

    Returns:
        values, and flags of the fields that are not up to 16 hexadecimal digits; an empty field is 0 and valid.
    """
    digits = _load(words, ends, widths)
    wrong = widths > 16
    flagged = digits & _FLAGS
    values = _combine(digits, 16)
    if int(widths.max(initial=0)) > 8:
        wide = np.flatnonzero(widths > 8)
        upper = _load(words, ends.ravel()[wide] - 8, np.minimum(widths.ravel()[wide] - 8, 8))
        flagged.ravel()[wide] |= upper & _FLAGS
        values.ravel()[wide] |= _combine(upper, 16) << _U32
    wrong |= flagged != 0
    return values.view(np.int64), wrong


def parse_integers(words: Words, ends: Positions, widths: Positions) -> tuple[Positions, NDArray[np.bool_]]:
    """Parse decimal fields, optionally negative, of up to 16 digits; otherwise as `parse_hex`."""
    # The sign is the field's first byte.
    first = words[ends - widths + len(_PADDING)] & np.uint64(0xFF)
    negative = (first == _MINUS) & (widths > 1)
    widths = widths - negative
    digits = _load(words, ends, widths)
    flagged = (digits & _FLAGS) | ((digits + _SIXES) & _TENS)
    wrong = widths > 16
    values = _combine(digits, 10)
    if int(widths.max(initial=0)) > 8:
        wide = np.flatnonzero(widths > 8)
        upper = _load(words, ends.ravel()[wide] - 8, np.minimum(widths.ravel()[wide] - 8, 8))
        flagged.ravel()[wide] |= (upper & _FLAGS) | ((upper + _SIXES) & _TENS)
        values.ravel()[wide] += _combine(upper, 10) * np.uint64(10**8)
    wrong |= flagged != 0
    signed = values.view(np.int64)
    return np.where(negative, -signed, signed), wrong


def quote(text: bytes) -> str:
    """The beginning of a field, quoted for an error message."""
    shown = text[:40].decode("ascii", "backslashreplace")
    return repr(shown + ("…" if len(text) > 40 else ""))
