from __future__ import annotations

import pytest

from bagpipe.store.redis.remedies import with_remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("WRONGTYPE a\r\nkey", "WRONGTYPE a key"),
        (
            "OOM command not allowed when used memory > 'maxmemory'.",
            "'maxmemory'; the server's memory is full: raise its maxmemory, ",
        ),
        ("command not allowed when used memory > 'maxmemory'.", "; the server's memory is full: "),  # of redis-py
        ("MISCONF Errors writing to the AOF file: No space left on device", "; the server cannot write its files: "),
        (
            "NOPERM User w has no permissions to run the 'hset' command",
            "command; the user of store.url lacks this right: ",
        ),
        (
            "WRONGPASS invalid username-password pair or user is disabled.",
            "disabled; check user and password in store.url, ",
        ),
        ("NOAUTH Authentication required.", "required; check user and password in store.url, "),
    ],
)
def test_errors_with_a_known_cause_get_a_remedy(text: str, expected: str):
    assert expected in with_remedy(text)
    assert "\n" not in with_remedy(text)
