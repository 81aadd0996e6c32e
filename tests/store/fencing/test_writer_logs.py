from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.fencing.fence import Fence, parse_log_name
from bagpipe.store.fencing.writer_logs import WriterLogs
from bagpipe.store.keys import bucket_key

TOKEN = "3-" + "ab" * 16
KEYS = [bucket_key("job", bucket) for bucket in range(3)]


def test_a_log_grows_by_one_element_for_each_command() -> None:
    book = WriterLogs(Fence(token=TOKEN, writer=1, epoch=4), KEYS)
    first = book.entries(np.array([2, 0, 1]))
    assert first.lengths == [2, 2, 2], "the first element says only that the log exists"
    assert first.token == TOKEN
    assert book.entries(np.array([1, 1, 0])).lengths == [4, 2, 3]
    assert book.current().lengths == [4, 2, 2]
    assert book.num_groups().tolist() == [3, 1, 1]
    assert first.keys[2] == b"job:{2}:log:" + TOKEN.encode() + b":4:1"


def test_the_next_epoch_begins_with_empty_logs() -> None:
    book = WriterLogs(Fence(token=TOKEN, writer=1, epoch=4), KEYS)
    book.entries(np.array([2, 0, 1]))
    following = book.next()
    assert following.fence == Fence(token=TOKEN, writer=1, epoch=5) == parse_log_name(following.log_name)
    assert following.current().lengths == [1, 1, 1]
    assert following.log_keys[0].endswith(b":5:1")


def test_invalid_tokens() -> None:
    with pytest.raises(ValueError, match="expected a token"):
        WriterLogs(Fence(token="3", writer=0, epoch=1), KEYS)
