"""Skew of Criteo's categorical columns, measured and fitted, and the published sizes of the full data set.

Measured on 80,000 examples of the Criteo click logs: the share of missing values, the distinct ids, and the share of
accesses to the most popular 0.1, 1 and 10 % of them. Beside each column stands the law of `data.zipf` that reproduces
these figures for 80,000 drawn examples (random search over its four numbers; coverages agree within 0.04, distinct ids
within 8 %). `tests/data/test_criteo_skew.py` repeats the draw. Batches of 1024 drawn examples hold 8,043 distinct ids
and share 28 % of them with the previous batch (measured: 7,962 and 29 %).
"""

from __future__ import annotations

from dataclasses import dataclass

from data.zipf import ZipfLaw

__all__ = [
    "COLUMNS",
    "CRITEO_KAGGLE_ROWS",
    "EXAMPLES_MEASURED",
    "ColumnSkew",
    "criteo_kaggle_rows",
]

EXAMPLES_MEASURED = 80_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSkew:
    """One categorical column.

    Attributes:
        missing: share of examples without a value.
        distinct: distinct ids among the values.
        top_0_1, top_1, top_10: share of accesses to the most popular 0.1, 1, 10 % of the distinct ids, rounded up.
        law: distribution of ids that reproduces these figures.
    """

    missing: float
    distinct: int
    top_0_1: float
    top_1: float
    top_10: float
    law: ZipfLaw


def _skew(
    missing: float, distinct: int, top_0_1: float, top_1: float, top_10: float,
    vocabulary: int, exponent: float, shift: float, head: float,
) -> ColumnSkew:  # fmt: skip
    law = ZipfLaw(vocabulary=vocabulary, exponent=exponent, shift=shift, head=head)
    return ColumnSkew(missing=missing, distinct=distinct, top_0_1=top_0_1, top_1=top_1, top_10=top_10, law=law)


# fmt: off
COLUMNS: tuple[ColumnSkew, ...] = (
    #     |-------------- measured ----------------|  |------------- fitted law --------------|
    #     missing distinct top0.1  top 1   top 10   vocabulary exponent  shift      head
    _skew(0.0408,  24777, 0.4368, 0.5564, 0.6875,   253377, 0.9104,      6.688, 0.3925),  # C1
    _skew(0.0000,   6440, 0.1231, 0.3473, 0.7392,     7843, 1.2714,     34.593, 0.0564),  # C2
    _skew(0.0000,   8356, 0.0712, 0.2288, 0.5975,     8824, 0.9406,     18.986, 0.0210),  # C3
    _skew(0.0000,   2567, 0.4967, 0.8064, 0.9396,     6798, 1.4180,      0.364, 0.2548),  # C4
    _skew(0.0000,   6273, 0.4993, 0.7488, 0.8883,    37603, 1.3181,      6.478, 0.4038),  # C5
    _skew(0.0000,      3, 0.8658, 0.8658, 0.8658,        3, 0.9527,     78.830, 0.8667),  # C6
    _skew(0.0000,   4789, 0.0796, 0.2577, 0.6341,     4904, 1.1408,     37.125, 0.0497),  # C7
    _skew(0.0000,    922, 0.0792, 0.3433, 0.7641,      922, 1.3185,      4.192, 0.0152),  # C8
    _skew(0.0000,     23, 0.4995, 0.4995, 0.6835,       23, 1.1902,      0.427, 0.5004),  # C9
    _skew(0.0408,  21397, 0.4369, 0.5698, 0.7190,   275531, 0.9856,      0.249, 0.2777),  # C10
    _skew(0.0408,   9325, 0.4707, 0.6629, 0.8257,    27354, 1.1255,      6.554, 0.3892),  # C11
    _skew(0.0000,  13755, 0.2811, 0.4182, 0.6904,    21408, 0.9925,     28.016, 0.2318),  # C12
    _skew(0.0000,      9, 0.3879, 0.3879, 0.3879,        9, 0.5084,      0.676, 0.3891),  # C13
    _skew(0.4204,   1084, 0.7213, 0.7944, 0.9121,     1646, 1.7816,     37.176, 0.7278),  # C14
    _skew(0.0000,   3270, 0.0963, 0.3790, 0.7843,     3900, 1.5755,     32.629, 0.0500),  # C15
    _skew(0.4204,     48, 0.6354, 0.6354, 0.8296,       48, 1.2872,      0.123, 0.6349),  # C16
    _skew(0.4204,      3, 0.5876, 0.5876, 0.5876,        3, 0.9018,      0.039, 0.5887),  # C17
    _skew(0.0000,    424, 0.5002, 0.8348, 0.9779,      888, 1.9866,      0.042, 0.0000),  # C18
    _skew(0.0000,     14, 0.5406, 0.5406, 0.7314,       14, 1.6729,      0.172, 0.5430),  # C19
    _skew(0.0408,  26716, 0.4274, 0.5404, 0.6680,   274881, 0.8687,      0.987, 0.3709),  # C20
    _skew(0.0408,  16156, 0.4445, 0.5962, 0.7631,    98285, 1.0383,      5.491, 0.3465),  # C21
    _skew(0.0408,  23486, 0.4371, 0.5626, 0.6999,   213530, 0.9234,      9.152, 0.4012),  # C22
    _skew(0.4204,   7889, 0.4556, 0.5912, 0.7704,    21207, 0.9888,      1.178, 0.3539),  # C23
    _skew(0.0000,   5773, 0.0690, 0.2601, 0.6401,     6094, 1.1151,     26.761, 0.0011),  # C24
    _skew(0.0000,     38, 0.3706, 0.3706, 0.8325,       38, 1.9415,      0.123, 0.3656),  # C25
    _skew(0.0000,     32, 0.3268, 0.3268, 0.8034,       32, 1.8586,      0.148, 0.3289),  # C26
)
# fmt: on

#: Published distinct ids of C1..C26 in the Criteo Kaggle training set (39,291,958 examples): 33.76 M ids.
CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def criteo_kaggle_rows() -> dict[str, int]:
    """Table name -> rows at the full scale of Criteo Kaggle."""
    return {f"C{number}": rows for number, rows in enumerate(CRITEO_KAGGLE_ROWS, start=1)}
