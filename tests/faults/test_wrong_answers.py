"""After a wrong answer of the store server the connection is dropped and no wrong row is returned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.interface import Rows, Store
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.faults.relay import Relay

pytestmark = pytest.mark.redis

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")
IDS = np.arange(8)
ROWS = np.arange(32, dtype=np.float32).reshape(8, 4) + 1
OTHERS = IDS + 100

Alteration = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def relay(redis_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A relay to a server whose namespace has two chunks of rows in one bucket."""
    with open_store(redis_server.url, namespace="wrong-answers", schema=SCHEMA, buckets=1) as store:
        store.claim()
        store.write(0, IDS, ROWS)
        store.write(0, OTHERS, -ROWS)
    with Relay(redis_server.url, tmp_path_factory.mktemp("relay")) as relay:
        yield relay


def answers(relay: Relay, alteration: Alteration, timeout_s: float = 0.3) -> bool:
    """Whether a read with an altered answer returns, with the right rows. Only the next read can fail, too."""
    with open_store(relay.url, namespace="wrong-answers", schema=SCHEMA, buckets=1, timeout_s=timeout_s) as store:
        relay.alter(alteration)
        returned = reads(store, IDS, ROWS)
        reads(store, OTHERS, -ROWS)
        return returned


def reads(store: Store, ids: NDArray[np.int64], rows: Rows) -> bool:
    try:
        found = store.read(0, ids)
    except StoreError:
        return False
    assert found.found.all()
    assert (found.rows == rows).all()
    return True


def bulk(number: int, change: Alteration) -> Alteration:
    """Alters one row of an answer, with its header."""

    def alteration(answer: bytes) -> bytes:
        header = re.match(rb"\*8\r\n(\$(\d+)\r\n)", answer)
        assert header is not None
        size = len(header[1]) + int(header[2]) + 2
        start = 4 + number * size
        return answer[:start] + change(answer[start : start + size]) + answer[start + size :]

    return alteration


def rows_exchanged(answer: bytes) -> bytes:
    size = (len(answer) - 4) // 8
    return answer[:4] + answer[4 + size : 4 + 2 * size] + answer[4 : 4 + size] + answer[4 + 2 * size :]


ALTERATIONS: dict[str, Alteration] = {
    "a reply too many": lambda answer: answer * 2,
    "a byte too many": lambda answer: answer + b"\n",
    "a number": lambda answer: b":8\r\n",
    "a simple string": lambda answer: b"+OK\r\n",
    "no array": lambda answer: b"*-1\r\n",
    "an empty array": lambda answer: b"*0\r\n",
    "a shorter array": lambda answer: answer.replace(b"*8", b"*7", 1),
    "a longer array": lambda answer: answer.replace(b"*8", b"*9", 1),
    "an error": lambda answer: b"-ERR no\r\n",
    "an endless error": lambda answer: b"-" + b"x" * 100_000,
    "a cut row, then the end": lambda answer: answer[:60],
    "a row too long for any memory": bulk(3, lambda row: b"$9999999999999\r\n" + row[5:]),
    "a row of a negative length": bulk(3, lambda row: b"$-7\r\n" + row[5:]),
    "a row of a length that is none": bulk(3, lambda row: b"$1x\r\n" + row[5:]),
    "a shorter row": bulk(3, lambda row: b"$12\r\n" + row[5:17] + b"\r\n"),
    "a number for a row": bulk(3, lambda row: b":1\r\n"),
    "rows exchanged": rows_exchanged,
    "a bit flipped": bulk(5, lambda row: row[:9] + bytes([row[9] ^ 4]) + row[10:]),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_a_wrong_answer_is_never_taken_for_rows(relay: Relay, name: str) -> None:
    assert not answers(relay, ALTERATIONS[name])


def test_an_unchanged_answer(relay: Relay) -> None:
    assert answers(relay, lambda answer: answer, timeout_s=30.0)


def test_a_connection_that_closes_instead(relay: Relay) -> None:
    """The client can retry on a new connection and then gets the right rows."""
    assert answers(relay, lambda answer: b"") in (False, True)


def test_an_omitted_row_is_not_found(relay: Relay) -> None:
    """The plan decides whether the row is new or lost."""
    with open_store(relay.url, namespace="wrong-answers", schema=SCHEMA, buckets=1) as store:
        relay.alter(bulk(3, lambda row: b"$-1\r\n"))
        assert store.read(0, IDS).found.tolist() == [True] * 3 + [False] + [True] * 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), new=st.binary(max_size=3), length=st.integers(1, 3))
def test_any_bytes_of_an_answer_replaced(relay: Relay, at: int, new: bytes, length: int) -> None:
    assert answers(relay, lambda answer: answer[:at] + new + answer[at + length :]) in (False, True)


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b"+QUEUED\r\n", b"*0\r\n", b"$-1\r\n", b"-OOM no memory\r\n", b":3\r\n:3\r\n"]
)
def test_a_wrong_acknowledgement_is_an_error(relay: Relay, redis_server: EmbeddedServer, answer: bytes) -> None:
    with open_store(relay.url, namespace="wrong-acks", schema=SCHEMA, buckets=1, timeout_s=0.3) as store:
        relay.alter(lambda _: answer)
        with pytest.raises(StoreError):
            store.write(0, IDS, ROWS)
