"""Forms of administrative replies."""

from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.store.redis.reply_forms import (
    BUCKET_STATE,
    COUNT,
    DURATION,
    PAIRS,
    TEXT,
    TEXT_OR_NONE,
    TEXTS,
    ReplyForm,
    info_number,
)

FORMS = {form.name: form for form in (BUCKET_STATE, COUNT, DURATION, PAIRS, TEXT, TEXT_OR_NONE, TEXTS)}


@pytest.mark.parametrize(
    ("reply", "forms"),
    [
        (0, {COUNT, DURATION}),
        (-2, {DURATION}),
        (b"", {TEXT, TEXT_OR_NONE}),
        (None, {TEXT_OR_NONE}),
        ([], {PAIRS, TEXTS}),
        ([b"a"], {TEXTS}),
        ([b"a", b"b"], {PAIRS, TEXTS}),
        ([b"a", 1], set()),
        ("OK", set()),
        (1.5, set()),
        ([b"owner", b"", 7], {BUCKET_STATE}),
        ([b"owner", b"", 7, b"log", 2], {BUCKET_STATE}),
        ([b"owner", b"", 7, b"log"], set()),
        ([b"owner", b"", 7, b"log", -1], set()),
        ([b"owner", b"", b"7"], {TEXTS}),
        ([[b"owner"], b"", 7], set()),
    ],
)
def test_a_reply_has_these_forms(reply: object, forms: set[ReplyForm]) -> None:
    assert {name for name, form in FORMS.items() if form.fits(reply)} == {form.name for form in forms}


def test_numbers_of_info() -> None:
    assert info_number("redis://a", {"maxmemory": 5}, "maxmemory") == 5
    assert info_number("redis://a", {}, "maxmemory") == 0
    with pytest.raises(InputError, match=r"^store redis://a: INFO states maxmemory 'x', expected a number$"):
        info_number("redis://a", {"maxmemory": "x"}, "maxmemory")
